"""`python -m examples.demo`, or `make demo`: exit code 0 only if everything went as it must."""

import json
import signal
import sys
import time
from dataclasses import asdict
from typing import Any

from gpubroker import BrokerError
from rich.console import Console

from examples.demo.narrator import Narrator
from examples.demo.screen import screen_on, summary
from examples.demo.service import ServiceFailed, running_service
from examples.demo.story import Deviation, Ending, Story
from examples.demo.workload import Reference


def main() -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    began = time.monotonic()
    console = Console(highlight=False)
    try:
        ending = run(console, began)
    except KeyboardInterrupt:
        return _failed("interrupted; the service was stopped", 130)
    except (Deviation, ServiceFailed, BrokerError) as error:
        return _failed(str(error), 1)
    console.print(summary(ending))
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"demo": "ok", "seconds": seconds, **asdict(ending)}), flush=True)
    return 0


def run(console: Console, began: float) -> Ending:
    narrator = Narrator(began)
    with screen_on(console) as screen, running_service() as broker, Reference() as reference:
        narrator.says(f"the service is ready at {broker.connection.url}")
        return Story(broker, screen, narrator).tell(reference)


def _interrupt(_signal: int, _frame: Any) -> None:
    raise KeyboardInterrupt


def _failed(why: str, code: int) -> int:
    print(f"demo: {why}", file=sys.stderr)
    print(json.dumps({"demo": "failed", "why": why.splitlines()[0]}), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
