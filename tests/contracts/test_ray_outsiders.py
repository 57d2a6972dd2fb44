"""Processes that others started and that hold a lease: measured as theirs, and let alone."""

import contextlib
import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from gpubroker.runtime.process import INSTANCE_MARK
from gpubroker_server.adapters.nvml.probe import NvmlProbe
from gpubroker_server.adapters.ray.agent.device_meter import Meter
from gpubroker_server.adapters.ray.agent.run_records import RunFiles
from gpubroker_server.adapters.ray.processes import is_marked, process_id

from tests.contracts.nvml_machine import Gpu, Machine
from tests.contracts.nvml_machine import process as process_on
from tests.contracts.runner_stand import GPU, Line, Stand, a_line

OpenLine = Callable[..., Line]
Process = subprocess.Popen[bytes]

LEASES = ((GPU, 7000),)
KEY = ("task_lease", 1, 0)


@pytest.fixture
def stand() -> Iterator[Stand]:
    with contextlib.closing(Stand()) as stand:
        yield stand


@pytest.fixture
def process() -> Iterator[Process]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


class Family(NamedTuple):
    parent: Process
    child: int
    """Its process id."""


@pytest.fixture
def family() -> Iterator[Family]:
    parent = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    yield Family(parent, child)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    parent.kill()
    parent.wait()


@contextlib.contextmanager
def a_process_marked(instance: str) -> Iterator[int]:
    """As what a run starts is, wherever it goes."""
    with subprocess.Popen(["sleep", "600"], env=os.environ | {INSTANCE_MARK: instance}) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def open_line(stand: Stand, tmp_path: Path) -> OpenLine:
    return partial(a_line, stand, tmp_path)


async def watch(line: Line, pid: int, lease: str = "task_lease") -> None:
    await line.order("watch", lease, 1, 0, pid, LEASES)


async def proof_of_end(line: Line, lease: str) -> Any:
    return (await line.hear("gone", lease))[5]


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


async def test_a_process_of_the_agent_or_above_it_is_nobodys_to_name(open_line: OpenLine) -> None:
    line = open_line()
    await line.announce()
    for number, pid in enumerate((os.getpid(), os.getppid(), 1)):
        await watch(line, pid, f"lease{number}")
        assert await proof_of_end(line, f"lease{number}") == "not_your_process"


async def test_the_process_of_a_run_and_those_below_it_are_no_outsiders(
    open_line: OpenLine, stand: Stand, family: Family
) -> None:
    line = open_line()
    stand.birth = lambda runner: runner.become(family.parent)
    await line.announce()
    await line.start("t", leases=LEASES)
    await line.until(lambda: "t" in stand.started)
    await watch(line, family.child, "child")
    assert await proof_of_end(line, "child") == "not_your_process"
    await watch(line, family.parent.pid, "itself")
    assert await proof_of_end(line, "itself") == "not_your_process"
    line.heard.clear()
    await line.announce()
    assert used_by(await line.hear("sampled")) == {"t:1": 7000}


async def test_what_a_run_started_is_no_outsider_even_where_it_left_the_runs_tree(
    open_line: OpenLine,
) -> None:
    line = open_line()
    await line.announce()
    instance = line.config.instance
    with a_process_marked(instance) as pid:
        await line.until(lambda: is_marked(pid, instance))
        await watch(line, pid)
        assert await proof_of_end(line, "task_lease") == "not_your_process"


async def test_a_process_is_of_one_lease(open_line: OpenLine, family: Family) -> None:
    line = open_line()
    await line.announce()
    await watch(line, family.child, "first")
    for number, pid in enumerate((family.child, family.parent.pid)):
        await watch(line, pid, f"lease{number}")
        assert await proof_of_end(line, f"lease{number}") == "not_your_process"
    os.kill(family.child, signal.SIGKILL)
    assert await proof_of_end(line, "first") == "process_absent"


async def test_what_is_below_a_run_and_a_leases_process_is_the_runs(family: Family) -> None:
    """As when the broker is started anew from the shell that a lease names."""
    gpu = Gpu(
        "GPU-a", used_mb=900, compute=[process_on(family.child, 700), process_on(family.parent.pid, 200)]
    )
    leases = {"GPU-a": 1000}
    groups = {
        "run": (process_id(family.child), leases),
        "lease": (process_id(family.parent.pid), leases),
    }
    [(_uuid, _used, foreign_mb, by_holder, _)] = await Meter(NvmlProbe(Machine(gpu))).measure(groups)
    assert (foreign_mb, by_holder) == (0, {"run": 700, "lease": 200})


@pytest.mark.parametrize("step", ["write_card", "pidfd_open"])
async def test_a_watch_that_could_not_be_begun_is_tried_again(
    open_line: OpenLine, process: Process, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    line = open_line()
    await line.announce()
    target, name = (RunFiles, step) if step == "write_card" else (os, step)
    works = getattr(target, name)
    failed: list[str] = []

    def fails_once(*given: Any) -> Any:
        if not failed:
            failed.append(name)
            raise OSError(errno.EMFILE, "too many open files")
        return works(*given)

    monkeypatch.setattr(target, name, fails_once)
    await watch(line, process.pid)
    assert failed == [name]
    process.kill()
    process.wait()
    assert await proof_of_end(line, "task_lease") == "process_absent"


async def test_one_that_ended_while_nobody_watched_is_gone(open_line: OpenLine, process: Process) -> None:
    first = open_line()
    await first.announce()
    await watch(first, process.pid)
    second = open_line()
    process.kill()
    process.wait()
    await second.announce()
    assert (await second.hear("gone", "task_lease"))[5] == "process_absent"
