"""Processes that others started and that hold a lease: measured, watched and never signalled."""

import contextlib
import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pynvml
import pytest
from gpubroker.runtime.process import INSTANCE_MARK
from gpubroker_server.adapters.nvml.meter import DeviceMeter
from gpubroker_server.adapters.nvml.probe import NvmlProbe
from gpubroker_server.adapters.ray.agent.run_files import RunFiles
from gpubroker_server.adapters.ray.processes import disjoint_trees, marks_of, process_id
from gpubroker_server.core.domain.units import Mib
from gpubroker_server.ports.devices import ProcessGroup

from tests.contracts.fake_runners import GPU, FakeRunners, Leader
from tests.nvml.machine import Gpu, Machine
from tests.nvml.machine import Process as ProcessOn

OpenLeader = Callable[..., Leader]
Process = subprocess.Popen[bytes]

LEASES = ((GPU, 7000),)
KEY = ("task_lease", 1, 0)


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
    """As every process of a run is, wherever it goes."""
    with subprocess.Popen(["sleep", "600"], env=os.environ | {INSTANCE_MARK: instance}) as process:
        yield process.pid
        process.kill()


async def watch(leader: Leader, pid: int, lease: str = "task_lease") -> None:
    await leader.order("watch", lease, 1, 0, pid, LEASES)


async def proof_of_end(leader: Leader, lease: str) -> Any:
    return (await leader.receive("gone", lease))[5]


async def known_runs(leader: Leader) -> Any:
    """The runs that the agent names after another announcement."""
    leader.received.clear()
    await leader.announce()
    return (await leader.receive("node_seen"))[4]


def used_by(report: Any) -> dict[str, int]:
    [(_uuid, _used, _foreign, by_holder, _utilization)] = report[-1]
    return dict(by_holder)


async def test_the_use_of_an_external_process_counts_as_its_own_until_it_ends(
    open_leader: OpenLeader, process: Process
) -> None:
    leader = open_leader()
    await leader.announce()
    await watch(leader, process.pid)
    assert await known_runs(leader) == (KEY,)
    assert used_by(await leader.receive("sampled")) == {"task_lease:1": 7000}
    process.kill()
    process.wait()
    gone = await leader.receive("gone", "task_lease")
    assert gone[1:4] == KEY
    assert gone[5] == "process_absent"
    assert used_by(gone) == {}


async def test_an_absent_process_is_reported_gone(open_leader: OpenLeader, process: Process) -> None:
    process.kill()
    process.wait()
    leader = open_leader()
    await leader.announce()
    await watch(leader, process.pid)
    assert (await leader.receive("gone", "task_lease"))[5] == "process_absent"


async def test_its_end_is_reported_to_every_leader_until_it_is_forgotten(
    open_leader: OpenLeader, process: Process
) -> None:
    leader = open_leader()
    await leader.announce()
    await watch(leader, process.pid)
    process.kill()
    process.wait()
    await leader.receive("gone", "task_lease")
    assert await known_runs(leader) == (KEY,)
    await leader.receive("gone", "task_lease")
    await leader.order("forget", *KEY)
    assert await known_runs(leader) == ()


async def test_a_stop_and_a_second_watch_change_nothing(open_leader: OpenLeader, process: Process) -> None:
    leader = open_leader()
    await leader.announce()
    await watch(leader, process.pid)
    await leader.stop("task_lease")
    await watch(leader, 2**22 + 1)  # more than Linux ever gives
    assert await known_runs(leader) == (KEY,)
    assert used_by(await leader.receive("sampled")) == {"task_lease:1": 7000}
    assert process.poll() is None
    assert leader.kinds_of("task_lease") == []


async def test_a_later_agent_goes_on_watching_the_same_process(
    open_leader: OpenLeader, process: Process
) -> None:
    first = open_leader()
    await first.announce()
    await watch(first, process.pid)
    second = open_leader()
    second.term = 2
    assert await known_runs(second) == (KEY,)
    process.kill()
    process.wait()
    assert (await second.receive("gone", "task_lease"))[5] == "process_absent"
    await second.until(lambda: not list((Path(second.config.run_dir) / "n1").glob("*.json")))


async def test_the_agent_and_its_ancestors_cannot_hold_a_lease(open_leader: OpenLeader) -> None:
    leader = open_leader()
    await leader.announce()
    for number, pid in enumerate((os.getpid(), os.getppid(), 1)):
        await watch(leader, pid, f"lease{number}")
        assert await proof_of_end(leader, f"lease{number}") == "not_your_process"


async def test_the_processes_of_a_run_are_not_external(
    open_leader: OpenLeader, runners: FakeRunners, family: Family
) -> None:
    leader = open_leader()
    runners.on_start = lambda runner: runner.become(family.parent)
    await leader.announce()
    await leader.start("t", leases=LEASES)
    await leader.until(lambda: "t" in runners.started)
    await watch(leader, family.child, "child")
    assert await proof_of_end(leader, "child") == "not_your_process"
    await watch(leader, family.parent.pid, "itself")
    assert await proof_of_end(leader, "itself") == "not_your_process"
    leader.received.clear()
    await leader.announce()
    assert used_by(await leader.receive("sampled")) == {"t:1": 7000}


async def test_a_process_that_left_the_tree_of_its_run_is_not_external(
    open_leader: OpenLeader,
) -> None:
    leader = open_leader()
    await leader.announce()
    instance = leader.config.instance
    with a_process_marked(instance) as pid:
        await leader.until(lambda: marks_of(pid).get(INSTANCE_MARK) == instance)
        await watch(leader, pid)
        assert await proof_of_end(leader, "task_lease") == "not_your_process"


async def test_a_process_belongs_to_one_lease(open_leader: OpenLeader, family: Family) -> None:
    leader = open_leader()
    await leader.announce()
    await watch(leader, family.child, "first")
    for number, pid in enumerate((family.child, family.parent.pid)):
        await watch(leader, pid, f"lease{number}")
        assert await proof_of_end(leader, f"lease{number}") == "not_your_process"
    os.kill(family.child, signal.SIGKILL)
    assert await proof_of_end(leader, "first") == "process_absent"


async def test_a_process_below_a_run_and_an_external_process_counts_for_the_run(
    new_machine: Callable[..., Machine], family: Family
) -> None:
    """As when the broker is restarted from the shell that holds a lease."""
    gpu = Gpu("GPU-a", used_mb=900, compute=[ProcessOn(family.child, 700), ProcessOn(family.parent.pid, 200)])
    trees = disjoint_trees({"run": process_id(family.child), "lease": process_id(family.parent.pid)})
    groups = {name: ProcessGroup(pids, {"GPU-a": Mib(1000)}) for name, pids in trees.items()}
    new_machine(gpu)
    pynvml.nvmlInit()
    [device] = await DeviceMeter([NvmlProbe(pynvml, 0)]).measure(lambda: groups)
    assert (device.foreign_mb, device.by_holder) == (0, {"run": 700, "lease": 200})


@pytest.mark.parametrize("step", ["write_record", "pidfd_open"])
async def test_a_watch_that_failed_is_tried_again(
    open_leader: OpenLeader, process: Process, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    leader = open_leader()
    await leader.announce()
    target, name = (RunFiles, step) if step == "write_record" else (os, step)
    works = getattr(target, name)
    failed: list[str] = []

    def fails_once(*given: Any) -> Any:
        if not failed:
            failed.append(name)
            raise OSError(errno.EMFILE, "too many open files")
        return works(*given)

    monkeypatch.setattr(target, name, fails_once)
    await watch(leader, process.pid)
    assert failed == [name]
    process.kill()
    process.wait()
    assert await proof_of_end(leader, "task_lease") == "process_absent"


async def test_a_process_that_ended_while_no_agent_watched_is_reported_gone(
    open_leader: OpenLeader, process: Process
) -> None:
    first = open_leader()
    await first.announce()
    await watch(first, process.pid)
    second = open_leader()
    process.kill()
    process.wait()
    await second.announce()
    assert (await second.receive("gone", "task_lease"))[5] == "process_absent"
