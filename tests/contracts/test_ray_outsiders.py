"""Processes that others started and that hold a lease: measured as theirs, and let alone."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.adapters.ray.agent import NodeAgent
from tests.contracts.runner_stand import GPU, Line, Stand, an_agent_config

OpenLine = Callable[..., Line]
Process = subprocess.Popen[bytes]

LEASES = ((GPU, 7000),)
KEY = ("task_lease", 1, 0)


@pytest.fixture
def stand() -> Iterator[Stand]:
    stand = Stand()
    yield stand
    stand.close()


@pytest.fixture
def process() -> Iterator[Process]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def open_line(stand: Stand, tmp_path: Path) -> OpenLine:
    def open_one(**changes: Any) -> Line:
        config = an_agent_config(tmp_path, **changes)
        return Line(NodeAgent(config.to_json(), stand), config)

    return open_one


async def watch(line: Line, pid: int) -> None:
    await line.order("watch", *KEY, pid, LEASES)


async def known_runs(line: Line) -> Any:
    """What the agent names when it is announced again."""
    line.heard.clear()
    await line.announce()
    return (await line.hear("node_seen"))[4]


def used_by(report: Any) -> dict[str, int]:
    [(_uuid, _used, _foreign, by_holder, _utilization)] = report[-1]
    return dict(by_holder)


async def test_what_it_uses_is_its_own_until_it_has_ended(open_line: OpenLine, process: Process) -> None:
    line = open_line()
    await line.announce()
    await watch(line, process.pid)
    assert await known_runs(line) == (KEY,)
    assert used_by(await line.hear("sampled")) == {"task_lease:1": 7000}
    process.kill()
    process.wait()
    gone = await line.hear("gone", "task_lease")
    assert gone[1:4] == KEY
    assert gone[5] == "process_absent"
    assert used_by(gone) == {}


async def test_one_that_is_not_there_is_gone(open_line: OpenLine, process: Process) -> None:
    process.kill()
    process.wait()
    line = open_line()
    await line.announce()
    await watch(line, process.pid)
    assert (await line.hear("gone", "task_lease"))[5] == "process_absent"


async def test_its_end_is_told_to_every_leader_until_it_is_forgotten(
    open_line: OpenLine, process: Process
) -> None:
    line = open_line()
    await line.announce()
    await watch(line, process.pid)
    process.kill()
    process.wait()
    await line.hear("gone", "task_lease")
    assert await known_runs(line) == (KEY,)
    await line.hear("gone", "task_lease")
    await line.order("forget", *KEY)
    assert await known_runs(line) == ()


async def test_a_stop_does_nothing_to_it_and_a_second_watch_names_no_other_process(
    open_line: OpenLine, process: Process
) -> None:
    line = open_line()
    await line.announce()
    await watch(line, process.pid)
    await line.stop("task_lease")
    await watch(line, 2**22 + 1)  # more than Linux ever gives
    assert await known_runs(line) == (KEY,)
    assert used_by(await line.hear("sampled")) == {"task_lease:1": 7000}
    assert process.poll() is None
    assert line.told_of("task_lease") == []


async def test_a_later_agent_goes_on_watching_the_same_process(open_line: OpenLine, process: Process) -> None:
    first = open_line()
    await first.announce()
    await watch(first, process.pid)
    second = open_line()
    second.term = 2
    assert await known_runs(second) == (KEY,)
    process.kill()
    process.wait()
    assert (await second.hear("gone", "task_lease"))[5] == "process_absent"
    await second.until(lambda: not list((Path(second.config.run_dir) / "n1").glob("*.json")))


async def test_one_that_ended_while_nobody_watched_is_gone(open_line: OpenLine, process: Process) -> None:
    first = open_line()
    await first.announce()
    await watch(first, process.pid)
    second = open_line()
    process.kill()
    process.wait()
    await second.announce()
    assert (await second.hear("gone", "task_lease"))[5] == "process_absent"
