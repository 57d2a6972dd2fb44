"""A service that starts one run and is then killed: `python -m tests.e2e.ray_service DATA_DIR GATE`."""

import asyncio
import sys
from pathlib import Path

from service.core.orders import Started
from tests.e2e.ray_lab import Lab, lab_options


async def main(home: Path, gate: str) -> None:
    lab = Lab(lab_options(home, spares=1, warm_runners=0))
    await lab.open()
    run = await lab.start("wait_for_file", gate, gpu_mb=1000, task="survivor")
    await run.first(Started)
    print("running", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
