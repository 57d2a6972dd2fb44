"""A GPU on which runs fail at once is told from a program that fails everywhere."""

from typing import Any

import pytest
from gpubroker_server.core.control.failing_gpus import FailingGpuRules, FailingGpus
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import Ended, Ending, Failure, Gone
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Fence, Instant, Seconds, TaskId
from gpubroker_server.core.world.world import World

from tests.builders import GIB, NOW, Holding, a_device, a_task, a_world, holding, key

RULES = FailingGpuRules(times=3, seconds=Seconds(30.0))
LATE = Instant(NOW + 100.0)


class Fleet:
    """GPUs with runs; each run ends as a test says."""

    def __init__(self) -> None:
        self.world: World = a_world(a_device("gpu0"), a_device("gpu1"), a_device("gpu2"))
        self.watch = FailingGpus(RULES)
        self._count = 0

    def run(self, name: str, gpu: str, ending: Ending | None, after: float = 1.0, **fields: Any) -> None:
        """`ending`: None if its process is gone without a word."""
        self._count += 1
        task = a_task(f"{name}{self._count}", name=name, gpu_mb=GIB)
        held: Holding = holding(task, gpu, started_at=NOW, **fields)
        world = a_world(a_device("gpu0"), a_device("gpu1"), a_device("gpu2"), held)
        at = Instant(NOW + after)
        run = TaskId(task.id), Fence(1), at
        gone = Gone(*run, Proof.PROCESS_ABSENT)
        reports = (
            [gone] if ending is None else [Ended(*run, ending, failure=Failure("exception", "CUDA")), gone]
        )
        self.watch.note(world, reports)

    def fails(self, name: str, gpu: str, times: int = 1, **fields: Any) -> None:
        for _ in range(times):
            self.run(name, gpu, Ending.FAILED, **fields)

    def works(self, name: str, gpu: str) -> None:
        self.run(name, gpu, Ending.SUCCEEDED)

    def failing(self, now: float = NOW + 2.0) -> list[str]:
        return [one.device for one in self.watch.failing(Instant(now))]


def test_a_gpu_where_a_program_fails_that_works_elsewhere_is_found() -> None:
    fleet = Fleet()
    fleet.works("train", "gpu1")
    fleet.fails("train", "gpu0", 2)
    assert fleet.failing() == []
    fleet.fails("train", "gpu0")
    [found] = fleet.watch.failing(Instant(NOW + 2.0))
    assert (found.device, found.times, found.names) == (key("gpu0"), 3, ("train",))


def test_a_program_that_fails_on_each_gpu_is_no_fault_of_a_gpu() -> None:
    fleet = Fleet()
    for gpu in ("gpu0", "gpu1", "gpu2"):
        fleet.fails("broken", gpu, 10)
    assert fleet.failing() == []


def test_one_program_on_one_gpu_proves_nothing_and_two_programs_do() -> None:
    fleet = Fleet()
    fleet.fails("broken", "gpu0", 10)
    assert fleet.failing() == []
    fleet.fails("other", "gpu0", 3)
    assert fleet.failing() == [key("gpu0")]


def test_two_broken_gpus_are_found_beside_one_that_works() -> None:
    fleet = Fleet()
    fleet.works("train", "gpu2")
    fleet.fails("train", "gpu0", 3)
    fleet.fails("train", "gpu1", 3)
    assert fleet.failing() == [key("gpu0"), key("gpu1")]


def test_a_run_that_goes_well_there_ends_the_row() -> None:
    fleet = Fleet()
    fleet.works("train", "gpu1")
    fleet.fails("train", "gpu0", 2)
    fleet.works("eval", "gpu0")
    fleet.fails("train", "gpu0", 2)
    assert fleet.failing() == []


@pytest.mark.parametrize(
    ("ending", "fields", "counts"),
    [
        (None, {}, True),
        (Ending.FAILED, {"after": 31.0}, False),
        (Ending.STOPPED, {}, False),
        (Ending.FAILED, {"state": TaskState.STOPPING}, False),
    ],
)
def test_runs_that_crash_at_once_count_and_longer_or_stopped_ones_do_not(
    ending: Ending | None, fields: dict[str, Any], counts: bool
) -> None:
    fleet = Fleet()
    fleet.works("train", "gpu1")
    for _ in range(5):
        fleet.run("train", "gpu0", ending, **fields)
    assert fleet.failing() == [key("gpu0")] * counts


def test_failures_are_forgotten_after_an_hour_or_when_the_gpu_is_reopened() -> None:
    fleet = Fleet()
    fleet.works("train", "gpu1")
    fleet.fails("train", "gpu0", 3)
    assert fleet.failing(NOW + 4_000.0) == []
    assert fleet.failing() == [key("gpu0")]
    fleet.watch.forget(key("gpu0"))
    assert fleet.failing() == []


def test_what_failed_before_a_gpu_was_reopened_does_not_count() -> None:
    fleet = Fleet()
    fleet.works("train", "gpu1")
    fleet.fails("train", "gpu0", 3)
    assert fleet.failing() == [key("gpu0")]
    fleet.watch.forget(key("gpu0"))
    assert fleet.failing() == []


def test_reports_of_other_kinds_and_ends_of_unknown_runs_do_not_count() -> None:
    fleet = Fleet()
    fleet.works("train", "gpu1")
    nobody = Ended(TaskId("nobody"), Fence(1), NOW, Ending.FAILED)
    fleet.watch.note(fleet.world, ["a report of another kind", nobody])
    fleet.run("train", "gpu0", Ending.LOST)
    assert fleet.failing() == []


def test_a_run_that_lacked_host_memory_says_nothing_about_its_gpu() -> None:
    fleet = Fleet()
    fleet.works("train", "gpu1")
    task = a_task("greedy", name="train", gpu_mb=GIB)
    world = a_world(a_device("gpu0"), holding(task, "gpu0", started_at=NOW))
    lacking = Failure("host_memory_exceeded", "it took too much")
    for fence in range(3):
        del fence
        fleet.watch.note(
            world, [Ended(task.id, Fence(1), Instant(NOW + 1.0), Ending.FAILED, failure=lacking)]
        )
    assert fleet.failing() == []


def test_no_more_than_so_many_ends_and_names_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpubroker_server.core.control.failing_gpus.MAX_KEPT", 1)
    fleet = Fleet()
    fleet.works("train", "gpu1")
    fleet.works("evaluate", "gpu2")
    fleet.fails("train", "gpu0", 3)
    assert fleet.failing() == [], "it is forgotten that train works elsewhere"


def test_a_run_on_several_gpus_blames_none_of_them() -> None:
    fleet = Fleet()
    fleet.works("train", "gpu1")
    for number in range(3):
        task = a_task(f"wide{number}", name="train", gpus=2)
        devices = a_device("gpu0"), a_device("gpu1")
        world = a_world(*devices, holding(task, "gpu0", "gpu1", started_at=NOW))
        failure = Failure("exception", "CUDA")
        ended = Ended(task.id, Fence(1), Instant(NOW + 1.0), Ending.FAILED, failure=failure)
        fleet.watch.note(world, [ended])
    assert fleet.failing() == []
