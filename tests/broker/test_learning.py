"""From a measurement to what it teaches, and to the end of a run that takes more than it leased."""

from pathlib import Path

from gpubroker_server.core.domain.device import DeviceSample
from gpubroker_server.core.domain.estimates import RELATIVE_ERROR, SketchKey, What
from gpubroker_server.core.domain.orders import Sampled, StopOrder
from gpubroker_server.core.domain.task import StopReason, TaskState
from gpubroker_server.core.domain.units import Mib, NodeName, Position, Seconds, TaskId
from gpubroker_server.core.planning.forecasts.forecast_rounds import ForecastRounds, accuracy_topic
from gpubroker_server.core.planning.forecasts.reservations import Basis

from tests.broker.stage import Stage, a_stage
from tests.builders import GIB, key

HOUR = 3600.0


async def measured(stage: Stage, task: str, gib: int) -> None:
    """The leader hears that this run uses so much of its device."""
    [lease] = stage.world.leases_of(stage.world.tasks[TaskId(task)])
    now, mb = stage.clock.now(), Mib(gib * GIB)
    sample = DeviceSample(lease.device, now, mb, Mib(0), {f"{task}:{lease.fence}": mb})
    await stage.hear(Sampled(NodeName("n1"), now, (sample,)))


async def running(stage: Stage, task: str, seconds: float = HOUR) -> None:
    await stage.submit(task, seconds, subject="resnet", gpu_mb=4 * GIB)
    await stage.leader.cycle()
    await stage.turns_until(task, TaskState.RUNNING)


async def test_the_end_of_a_run_teaches_what_was_measured_of_it(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        await running(stage, "one", seconds=0.2)
        await measured(stage, "one", 3)
        await measured(stage, "one", 2)
        await stage.turns_until("one", TaskState.SUCCEEDED)
        sketches = dict((await stage.store.snapshot()).estimates)
    assert {topic.what for topic in sketches} == {What.GPU_MB, What.SECONDS}
    peak = sketches[SketchKey("default", "resnet", "sim", What.GPU_MB)].quantile(1.0)
    assert peak is not None
    assert abs(peak - 3 * GIB) <= 3 * GIB * RELATIVE_ERROR
    assert sketches == stage.world.learned.sketches


async def test_a_run_above_its_lease_is_reported_once_and_goes_on(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        await running(stage, "one")
        await measured(stage, "one", 6)
        await measured(stage, "one", 7)
        events = await stage.store.events(Position(0), 100, [TaskId("one")])
        assert [event.fields["overused_mb"] for event in events if event.kind == "lease.overused"] == [
            6 * GIB
        ]
        assert (await stage.row("one")).state is TaskState.RUNNING


async def test_by_policy_a_run_above_its_lease_is_stopped_and_fails_of_it(tmp_path: Path) -> None:
    async with a_stage(tmp_path, overuse="stop") as stage:
        await running(stage, "one")
        await measured(stage, "one", 6)
        stops = [order for order, _ in stage.executor.sent if isinstance(order, StopOrder)]
        assert [order.reason for order in stops] == [StopReason.OVERUSE]
        await stage.turns_until("one", TaskState.FAILED)
        record = await stage.store.record(TaskId("one"))
        assert record is not None
        assert record.failure is not None
        assert record.failure["kind"] == "over_use"
        peak = SketchKey("default", "resnet", "sim", What.GPU_MB)
        assert stage.world.learned.sketch(peak).n == 1, "the next one is told how much it takes"
        assert stage.world.ledgers[key("gpu0")].leased_mb() == 0


async def test_a_start_that_was_foretold_teaches_how_true_that_was(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        await stage.submit("one", 0.3, expected_seconds=Seconds(HOUR), gpus=2)
        await stage.leader.cycle()
        await stage.turns_until("one", TaskState.RUNNING)
        await stage.submit("two", HOUR, gpus=2)
        stage.leader.planner.forecast_rounds = ForecastRounds()  # else computed again after a second
        await stage.leader.cycle()
        [forecast] = stage.leader.planner.forecast_rounds.forecasts
        assert (forecast.task, forecast.basis) == ("two", Basis.STATED)
        await stage.turns_until("two", TaskState.RUNNING)
        sketches = dict((await stage.store.snapshot()).estimates)
    assert sketches[accuracy_topic(Basis.STATED, What.START_ERROR)].n == 1
    assert sketches[accuracy_topic(Basis.STATED, What.START_SHARE)].share_until(1.0) == 1.0


async def test_a_new_leader_gives_nothing_away_that_was_kept(tmp_path: Path) -> None:
    """It knows no forecasts when it begins, and works them out before its first plan."""
    async with a_stage(tmp_path) as stage:
        await stage.submit("one", HOUR, expected_seconds=Seconds(HOUR), gpus=1)
        await stage.turns_until("one", TaskState.RUNNING)
        await stage.submit("large", HOUR, gpus=2)
        await stage.submit("small", HOUR, gpus=1)
        stage.leader.planner.forecast_rounds = ForecastRounds()
        await stage.leader.cycle()
        assert (await stage.row("small")).state is TaskState.PENDING
        assert next(forecast.task for forecast in stage.leader.planner.forecast_rounds.forecasts) == "large"
