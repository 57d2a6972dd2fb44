"""What the end of a run teaches, and what it does not."""

from collections.abc import Iterable
from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision, Request
from gpubroker_server.core.domain.estimates import RELATIVE_ERROR, Observation, Sketch, SketchKey, What
from gpubroker_server.core.domain.holders import WorkerSeat
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import Ended, Ending, Gone, Report, Started
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import StopReason, TaskState, members_of
from gpubroker_server.core.domain.units import Fence, Instant, TaskId
from gpubroker_server.core.lifecycle.change_requests import carry_out
from gpubroker_server.core.lifecycle.gang_runs import stop_ranks
from gpubroker_server.core.lifecycle.learning import learn
from gpubroker_server.core.lifecycle.runs import apply_reports
from gpubroker_server.core.world.world import World
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.builders import (
    GIB,
    NOW,
    Holding,
    a_device,
    a_lease,
    a_node,
    a_sample,
    a_task,
    a_world,
    commit,
    holding,
    key,
)
from tests.core.gangs import Agents, a_gang, admit_all, bundles

SIZE = SketchKey("default", "resnet", "H100", What.GPU_MB)
TIME = SketchKey("default", "resnet", "H100", What.SECONDS)


def a_run(id: str = "run", *devices: str, **fields: Any) -> Holding:
    """A run of resnet for 100 s on a device, of which it leased 10 GiB."""
    task = a_task(id, subject="resnet", gpu_mb=10 * GIB)
    return holding(task, *(devices or ("gpu0",)), **fields)


def measured(world: World, mb: int, id: str = "run", device: str = "gpu0") -> None:
    world.measure([a_sample(device, used_mb=mb, by_holder={f"{id}:1": mb})])


def ended(id: str = "run", ending: Ending = Ending.SUCCEEDED) -> Ended:
    return Ended(TaskId(id), Fence(1), NOW, ending)


def taught(world: World, *reports: Report, most_topics: int = 100) -> list[Decision]:
    return learn(world, apply_reports(world, reports, NOW, Policy()), NOW, most_topics)


def lessons(decisions: Iterable[Decision]) -> dict[SketchKey, float]:
    return {lesson.topic: lesson.value for decision in decisions for lesson in decision.lessons}


def test_a_run_that_succeeded_teaches_its_peak_and_its_time() -> None:
    world = a_world(a_run())
    for mb in (3 * GIB, 8 * GIB, 5 * GIB):
        measured(world, mb)
    assert lessons(taught(world, ended())) == {SIZE: 8 * GIB, TIME: 100.0}


def test_a_run_without_a_device_teaches_its_time() -> None:
    world = a_world(a_node(), holding(a_task("run", subject="resnet", cpu=1.0), node="n1"))
    assert lessons(taught(world, ended())) == {replace(TIME, kind=""): 100.0}


def test_a_run_that_ended_before_a_sample_teaches_no_size() -> None:
    assert lessons(taught(a_world(a_run()), ended())) == {TIME: 100.0}


@pytest.mark.parametrize(("used_gib", "teaches"), [(79, {}), (57, {}), (55, {SIZE: 55 * GIB})])
def test_a_run_that_held_a_whole_device_and_filled_it_teaches_no_size(
    used_gib: int, teaches: dict[SketchKey, float]
) -> None:
    task = a_task("run", subject="resnet", gpu_mb=None)
    world = a_world(a_device("gpu0", mb=80 * GIB), holding(task, "gpu0", mb=80 * GIB))
    measured(world, used_gib * GIB)
    assert lessons(taught(world, ended())) == {**teaches, TIME: 100.0}


def test_of_several_devices_of_a_kind_the_one_that_it_used_most_counts() -> None:
    world = a_world(a_device("gpu0"), a_device("gpu1"), a_run("run", "gpu0", "gpu1"))
    measured(world, 2 * GIB)
    measured(world, 6 * GIB, device="gpu1")
    assert lessons(taught(world, ended()))[SIZE] == 6 * GIB


def test_each_kind_of_device_has_a_size_of_its_own() -> None:
    world = a_world(a_device("gpu0"), a_device("gpu1", kind="L4"), a_run("run", "gpu0", "gpu1"))
    measured(world, 2 * GIB)
    measured(world, 1 * GIB, device="gpu1")
    sizes = {
        topic.kind: mb for topic, mb in lessons(taught(world, ended())).items() if topic.what == "gpu_mb"
    }
    assert sizes == {"H100": 2 * GIB, "L4": 1 * GIB}


def test_a_run_that_resumed_earlier_work_does_not_teach_its_time() -> None:
    world = a_world(a_run(checkpoint_at=Instant(NOW - 200.0)))
    measured(world, GIB)
    assert lessons(taught(world, ended())) == {SIZE: GIB}


def test_a_worker_of_an_array_teaches_its_peak_and_no_time() -> None:
    """It works as long as there are items, or not at all."""
    run = a_run()
    worker = replace(run, task=replace(run.task, holder=WorkerSeat(run.task.id)))
    world = a_world(a_device("gpu0"), worker)
    measured(world, 4 * GIB)
    assert lessons(taught(world, ended())) == {SIZE: 4 * GIB}


def test_a_checkpoint_of_its_own_changes_nothing() -> None:
    assert TIME in lessons(taught(a_world(a_run(checkpoint_at=Instant(NOW - 50.0))), ended()))


@pytest.mark.parametrize("peak_mb", [4 * GIB, 10 * GIB])
def test_a_run_that_failed_within_its_lease_teaches_nothing(peak_mb: int) -> None:
    world = a_world(a_run())
    measured(world, peak_mb)
    assert lessons(taught(world, ended(ending=Ending.FAILED))) == {}


def test_a_run_that_failed_above_its_lease_teaches_what_it_took() -> None:
    world = a_world(a_run())
    measured(world, 14 * GIB)
    assert lessons(taught(world, ended(ending=Ending.FAILED))) == {SIZE: 14 * GIB}


def test_a_run_that_was_stopped_above_its_lease_teaches_what_it_took() -> None:
    deadline_at = Instant(NOW + 30.0)
    stopping: dict[str, Any] = {"stop_reason": StopReason.PREEMPT, "stop_deadline_at": deadline_at}
    world = a_world(a_run(state=TaskState.STOPPING, **stopping))
    measured(world, 14 * GIB)
    gone = Gone(TaskId("run"), Fence(1), NOW, Proof.PROCESS_ABSENT)
    assert lessons(taught(world, gone)) == {SIZE: 14 * GIB}


def test_a_run_that_goes_on_teaches_nothing() -> None:
    world = a_world(a_run(state=TaskState.ADMITTED))
    measured(world, 14 * GIB)
    assert lessons(taught(world, Started(TaskId("run"), Fence(1), NOW, pid=1))) == {}


def test_nothing_is_learned_without_a_subject() -> None:
    world = a_world(holding(a_task("run", gpu_mb=10 * GIB), "gpu0"))
    measured(world, GIB)
    assert lessons(taught(world, ended())) == {}


def test_the_end_of_a_task_that_waits_again_teaches_nothing_twice() -> None:
    claimed = replace(a_task("run", subject="resnet", gpu_mb=10 * GIB), fence=Fence(1))
    world = a_world(claimed, a_lease(claimed, "gpu0", 10 * GIB))
    measured(world, 14 * GIB)
    cancelled = carry_out(world, Request("r1", TaskId("run"), "default", "cancel", {}, NOW), NOW, Policy())
    assert lessons(learn(world, [cancelled], NOW)) == {}


def test_a_run_without_a_reported_start_does_not_teach_its_time() -> None:
    world = a_world(a_run(state=TaskState.ADMITTED))
    assert lessons(taught(world, ended())) == {}


def test_two_ends_in_one_batch_both_count() -> None:
    world = a_world(a_run("one"), a_run("two"))
    decisions = taught(world, ended("one"), ended("two"))
    written = [lesson.sketch.n for d in decisions for lesson in d.lessons if lesson.topic == TIME]
    assert written == [1, 2]
    commit(world, decisions)
    assert world.learned.sketches[TIME].n == 2


def test_log_holds_learned_values_and_the_world_makes_the_stored_sketch() -> None:
    world = a_world(a_run())
    measured(world, 8 * GIB)
    decisions = taught(world, ended())
    commit(world, decisions)
    rows = {lesson.topic: lesson.sketch for decision in decisions for lesson in decision.lessons}
    assert world.learned.sketches == rows
    median = world.learned.sketches[SIZE].quantile(0.5)
    assert median == pytest.approx(8 * GIB, rel=RELATIVE_ERROR)


def test_with_too_many_topics_the_least_recently_updated_is_dropped() -> None:
    world = a_world()
    for name in ("first", "second", "third"):
        topic = replace(TIME, subject=name)
        commit(
            world,
            Decision("x", "ended", lessons=(Observation(topic, 1.0, world.learned.sketch(topic), NOW),)),
        )
    again = replace(TIME, subject="first")
    commit(
        world, Decision("x", "ended", lessons=(Observation(again, 2.0, world.learned.sketch(again), NOW),))
    )
    world.add_task(a_run().task)
    for lease in a_run().leases:
        world.add_lease(lease)
    commit(world, taught(world, ended(), most_topics=3))
    assert [topic.subject for topic in world.learned.sketches] == ["third", "first", "resnet"]


def test_a_peak_is_forgotten_with_its_lease() -> None:
    world = a_world(a_run())
    measured(world, 8 * GIB)
    commit(world, taught(world, ended(), Gone(TaskId("run"), Fence(1), NOW, Proof.PROCESS_ABSENT)))
    measured(world, 8 * GIB)
    assert world.learned.peaks == {}
    assert world.ledgers[key("gpu0")].holdings == {}


def ranks_at_work(*peaks: int, **fields: Any) -> Agents:
    """A gang of resnet, of which each rank leased 10 GiB of one GPU and was measured to use so many."""
    gang = a_gang("run", *bundles(len(peaks), gpu_mb=10 * GIB), subject="resnet", **fields)
    world = a_world(a_device("gpu0"), gang)
    admit_all(world)
    agents = Agents(world, "run")
    agents.run()
    used = {f"run:1:{rank}" if rank else "run:1": mb for rank, mb in enumerate(peaks)}
    world.measure([a_sample("gpu0", used_mb=sum(peaks), by_holder=used)])
    return agents


def learned(gang: Agents, *reports: Report) -> list[tuple[str, float]]:
    """What these teach, in order; they are committed."""
    decisions = learn(gang.world, apply_reports(gang.world, reports, gang.now, gang.policy), gang.now)
    commit(gang.world, decisions)
    return [(lesson.topic.what, lesson.value) for each in decisions for lesson in each.lessons]


def test_each_rank_teaches_its_peak_at_its_end_and_the_gang_its_duration() -> None:
    gang = ranks_at_work(6 * GIB, 2 * GIB, 3 * GIB)
    assert learned(gang, gang.ended(1), gang.gone(1)) == [("gpu_mb", 2 * GIB)]
    assert learned(gang, gang.gone(1)) == []
    gang.now = Instant(NOW + 60.0)
    assert learned(gang, gang.ended(0), gang.ended(2)) == [
        ("gpu_mb", 6 * GIB),
        ("gpu_mb", 3 * GIB),
        ("seconds", 60.0),
    ]


def test_failed_gang_learns_only_from_done_ranks_and_those_above_the_lease() -> None:
    gang = ranks_at_work(2 * GIB, 14 * GIB, 3 * GIB, 4 * GIB, max_retries=1)
    assert learned(gang, gang.ended(0)) == [("gpu_mb", 2 * GIB)]
    assert learned(gang, gang.ended(1, Ending.FAILED)) == [("gpu_mb", 14 * GIB)]
    assert learned(gang, gang.ended(2)) == [], "it was told to stop, and did"
    assert learned(gang, gang.gone(3)) == []
    assert learned(gang, *map(gang.gone, (0, 1, 2))) == []
    assert gang.task.state is TaskState.PENDING


def test_a_gang_that_is_lost_at_once_teaches_peaks_above_its_leases() -> None:
    gang = ranks_at_work(2 * GIB, 14 * GIB)
    assert learned(gang, gang.node_lost("n1")) == [("gpu_mb", 14 * GIB)]
    assert members_of(gang.task) == ()


def test_a_rank_that_leaves_a_running_gang_has_not_succeeded() -> None:
    gang = ranks_at_work(2 * GIB, 3 * GIB, min_ranks=1)
    write, _ = stop_ranks(gang.world, gang.task, [1], TaskId("other"), gang.now)
    commit(gang.world, Decision("run", "preempt", tasks=(write,)))
    assert learned(gang, gang.ended(1)) == []
    assert learned(gang, gang.ended(0)) == [("gpu_mb", 2 * GIB), ("seconds", 0.0)]


ENDS = st.sampled_from([Ending.SUCCEEDED, Ending.FAILED, Ending.STOPPED, Ending.LOST])


@given(st.lists(st.lists(st.tuples(ENDS, st.integers(0, 20)), min_size=1, max_size=4), max_size=6))
@settings(max_examples=50)
def test_rows_and_log_agree_however_ends_come_together(batches: list[list[tuple[Ending, int]]]) -> None:
    world = a_world()
    rows: dict[SketchKey, Sketch] = {}
    for number, batch in enumerate(batches):
        names = [f"run-{number}-{at}" for at in range(len(batch))]
        for name, (_, gib) in zip(names, batch, strict=True):
            held = a_run(name)
            world.add_task(held.task)
            for lease in held.leases:
                world.add_lease(lease)
            measured(world, gib * GIB, name)
        reports = [ended(name, ending) for name, (ending, _) in zip(names, batch, strict=True)]
        decisions = taught(world, *reports)
        commit(world, decisions)
        rows |= {lesson.topic: lesson.sketch for decision in decisions for lesson in decision.lessons}
        for name in names:
            commit(
                world,
                apply_reports(
                    world, [Gone(TaskId(name), Fence(1), NOW, Proof.PROCESS_ABSENT)], NOW, Policy()
                ),
            )
    assert rows == world.learned.sketches
    assert world.learned.peaks == {}
