"""Count the paths of one scene: `python -m bench.cost.child SCENE`. Prints one JSON object for each.

The scene runs in a process of its own, because its clocks stand still, and because what one scene leaves
behind must not count in another.
"""

import os
import sys
import tempfile
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.cost import virtual_time

CLOCK = virtual_time.VirtualClock()
CLOCK.install()  # before the modules below are loaded, which keep functions of `time`
WORK = virtual_time.WorkOfThreads()
WORK.watch_executors()

import random  # noqa: E402

import msgspec  # noqa: E402

from bench.cost import items  # noqa: E402
from bench.cost.counting import CallCounter  # noqa: E402
from bench.cost.paths import SCENES  # noqa: E402
from bench.cost.service_here import watch_writer  # noqa: E402


async def count(scene: str, loop: virtual_time.VirtualLoop, counter: CallCounter) -> None:
    out = os.fdopen(os.dup(1), "w")  # a run may take over standard output
    with TemporaryDirectory(prefix="gpb-cost-", ignore_cleanup_errors=True) as folder:
        # Directories of runs lie below it. Two children that count at a time have runs with the same ids, and
        # each would end processes that have the other's log open.
        tempfile.tempdir = folder
        async for found in SCENES[scene](counter, loop, Path(folder)):
            print(msgspec.json.encode(found).decode(), file=out, flush=True)


def main() -> None:
    random.seed(42)
    loop = virtual_time.VirtualLoop(CLOCK, WORK)
    watch_writer(WORK)
    items.settle(loop, WORK)
    counter = CallCounter()
    counter.install()
    loop.run_until_complete(count(sys.argv[1], loop, counter))


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # nothing of the service needs to end, since it has no other process
