"""Fleet control in a leader: what it finds holds background work back, and is in the log."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from gpubroker_server.broker.fleet import DIAGNOSIS_SECONDS, MAX_NEWS, HostUse
from gpubroker_server.core.control.alarm import Threshold
from gpubroker_server.core.control.backpressure import Pressure
from gpubroker_server.core.control.finding_dates import FindingDate
from gpubroker_server.core.control.fleet import FleetRules, FleetSeen
from gpubroker_server.core.control.idle_templates import Template
from gpubroker_server.core.control.memory_failures import memory_of
from gpubroker_server.core.control.targets import FleetTarget, Measure
from gpubroker_server.core.control.throughput import ThroughputRules
from gpubroker_server.core.domain.decisions import Decision, ItemPage
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.device import DiskSample, NodeSample
from gpubroker_server.core.domain.orders import Ended, Ending, Failure, Loaded, NodeLost
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Fence, Instant, Mib, NodeName, Seconds, TaskId, Term
from gpubroker_server.core.world.events import Event
from gpubroker_server.ports.idle_templates import IdleTemplate
from gpubroker_server.ports.store import CommitVerdict, StoreUnavailable, TokenRow

from tests.broker.stage import ForgetfulStore, Hands, Stage, a_stage
from tests.builders import GIB, a_task, holding
from tests.patience import PATIENCE_SECONDS

LATER = Instant(2e9)

BUSY = FleetTarget(Measure.GPU_UTILIZATION, 0.6, 0.8)


async def look(stage: Stage, seconds: float = 2.0) -> None:
    await stage.later(seconds)
    assert stage.leader.fleet is not None
    await stage.leader.fleet.look()
    await stage.leader.cycle()


async def test_background_work_starts_gradually_while_the_fleet_is_below_target(
    tmp_path: Path,
) -> None:
    async with a_stage(tmp_path) as stage:
        stage.fleet_rules = FleetRules((BUSY,), controller=True)
        await stage.lead()
        await look(stage)
        tasks = [await stage.submit(f"b{n}", seconds=1e6, priority=20, gpu_mb=4 * GIB) for n in range(12)]
        high = await stage.submit("high", seconds=1e6, priority=50, gpu_mb=4 * GIB)
        await stage.turn()
        assert stage.world.tasks[high.id].is_active  # it is not background work
        started = []
        for _ in range(90):
            await look(stage)
            started.append(sum(stage.world.tasks[task.id].is_active for task in tasks))
        assert started[0] <= 1
        assert started == sorted(started)
        # Its simulated devices are busy once anything runs on them.
        assert 1 <= started[-1] < len(tasks)


class Cycles(asyncio.Event):
    """Set between them. Notes that a look waits for that."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited = asyncio.Event()

    async def wait(self) -> Literal[True]:
        self.awaited.set()
        return await super().wait()


@pytest.mark.parametrize("is_slow", [False, True])
async def test_a_look_lets_a_cycle_end_that_is_under_way_unless_that_takes_long(
    tmp_path: Path, *, is_slow: bool
) -> None:
    async with a_stage(tmp_path, sample_period_seconds=0.01 if is_slow else 1e6) as stage:
        stage.fleet_rules = FleetRules((BUSY,))
        await stage.lead()
        fleet, cycles = stage.leader.fleet, Cycles()
        assert fleet is not None
        keeping = asyncio.create_task(fleet.keep(cycles))
        await cycles.awaited.wait()
        if not is_slow:
            assert not fleet.seen.targets
            cycles.set()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not fleet.seen.targets:  # noqa: ASYNC110  # it is no event
                await asyncio.sleep(0)
        keeping.cancel()


async def test_what_it_finds_is_in_the_log_and_published(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        stage.fleet_rules = FleetRules(
            thresholds={
                "queue_length": Threshold(2.0, 1.0), "disk_percent": Threshold(90.0, 80.0),
                "store_seconds": Threshold(5.0, 1.0), "host_memory_percent": Threshold(90.0, 80.0),
            }
        )  # fmt: skip
        await stage.lead()
        kinds: list[tuple[str, str]] = []
        stage.store.listen(lambda events: kinds.extend((event.kind, event.key) for event in events))
        for n in range(2):
            await stage.submit(f"t{n}", gpu_mb=20 * GIB, not_before=LATER)
            await stage.submit(f"h{n}", gpu_mb=20 * GIB, held=True)  # it waits for a person, not for its turn
        stage.host = HostUse(95.0, None)
        await look(stage)
        fleet = stage.leader.fleet
        assert fleet is not None
        assert [one.name for one in fleet.seen.pressures] == ["disk_percent", "queue_length"]
        assert [kind for kind in kinds if kind[0].startswith("fleet.")] == [
            ("fleet.BACKPRESSURE_ACTIVATED", "queue_length"),
            ("fleet.BACKPRESSURE_ACTIVATED", "disk_percent"),
        ]
        told = {kind: count for kind, count in fleet.seen.events.items() if count}
        assert told == {"fleet.BACKPRESSURE_ACTIVATED": 2}


async def test_a_file_system_that_hangs_delays_no_look_and_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_stage(tmp_path) as stage:
        stage.fleet_rules = FleetRules(thresholds={"disk_percent": Threshold(90.0, 80.0)})
        await stage.lead()
        fleet, answers, asked = stage.leader.fleet, threading.Event(), []
        assert fleet is not None

        def hang() -> HostUse:
            asked.append(1)
            answers.wait()
            return HostUse(95.0, None)

        monkeypatch.setattr(fleet, "host_use", hang)
        monkeypatch.setattr("gpubroker_server.broker.fleet.ANSWER_SECONDS", 0.01)
        try:
            for _ in range(2):
                await look(stage)
            assert (fleet.seen.pressures, len(asked)) == ((), 1)
        finally:
            answers.set()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not fleet.seen.pressures:
                await look(stage)


async def test_how_long_admissions_take_is_what_the_oldest_waits_until_it_starts(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        stage.fleet_rules = FleetRules(thresholds={"admission_seconds": Threshold(2.5, 0.5)})
        await stage.lead()
        for name in ("first", "second"):
            await stage.submit(name, seconds=1.0, gpu_mb=20 * GIB)
        third = await stage.submit("third", seconds=1.0, gpu_mb=20 * GIB)
        await stage.submit("held", held=True)
        await stage.turns_until("second", TaskState.RUNNING)
        await look(stage)
        fleet = stage.leader.fleet
        assert fleet is not None
        assert fleet.seen.pressures == ()
        stage.clock.time = Instant(stage.clock.time + 8.0)
        await fleet.look()  # before a cycle: the third one waits still
        pressures: list[Any] = [*fleet.seen.pressures]
        assert [(one.name, one.value) for one in pressures] == [("admission_seconds", 10.0)]
        await stage.turns_until(third.id, TaskState.RUNNING)
        await look(stage)
        assert fleet.seen.pressures == ()


async def test_pressure_of_a_tenant_with_an_empty_queue_is_released_on_takeover(
    tmp_path: Path,
) -> None:
    async with a_stage(tmp_path) as stage:
        stage.fleet_rules = FleetRules(thresholds={"queue:*": Threshold(2.0, 1.0)})
        stage.fleet_before = FleetSeen(
            pressures=(Pressure("queue:gone", stage.clock.now(), 2.0, 2.0, 40, Seconds(30.0)),)
        )
        await stage.lead()
        await look(stage)
        fleet = stage.leader.fleet
        assert fleet is not None
        assert fleet.seen.events["fleet.BACKPRESSURE_RELEASED"] == 1
        assert fleet.seen.pressures == ()


async def test_what_is_wrong_is_as_old_for_the_next_leader_until_it_is_mended(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        began_at = Instant(stage.clock.now() - 1e4)
        dates = FindingDate("disk-full", "n1:/data", began_at), FindingDate("gone", "n1", began_at)
        stage.fleet_before = FleetSeen(dates=dates)
        await stage.lead()
        fleet = stage.leader.fleet
        assert fleet is not None
        stage.world.full_disks[NodeName("n1")] = "/data"
        new_at = stage.clock.now()
        full = FindingDate("node-closed-by-disk", "n1", new_at)
        disks = (DiskSample("/data", 100, 1),)
        stage.world.measure((), [a_node_sample(new_at, disks)])
        await fleet.look()
        assert set(fleet.seen.dates) == {dates[0], full}
        assert fleet.seen.at == new_at
        emptied = (DiskSample("/data", 100, 99),)
        for _ in range(2):  # The first look opens the node again, and the second finds nothing wrong.
            await stage.later(DIAGNOSIS_SECONDS + 1)
            stage.world.measure((), [a_node_sample(stage.clock.now(), emptied)])
            await fleet.look()
        assert fleet.seen.dates == ()


def a_node_sample(at: Instant, disks: tuple[DiskSample, ...]) -> NodeSample:
    return NodeSample(NodeName("n1"), at, 0.1, Mib(100), Mib(50), disks=disks)


async def test_news_are_told_until_they_are_committed(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        stage.fleet_rules = FleetRules(thresholds={"disk_percent": Threshold(90.0, 80.0)})
        await stage.lead()
        stage.host = HostUse(95.0, None)
        fleet = stage.leader.fleet
        assert fleet is not None
        await fleet.look()
        first = list(fleet.take())
        assert [one.notices[0].kind for one in first] == ["fleet.BACKPRESSURE_ACTIVATED"]
        assert fleet.take() == first
        fleet.told(first)
        assert fleet.take() == []


async def test_a_cycle_tells_some_of_many_news(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        stage.fleet_rules = FleetRules(thresholds={"queue:*": Threshold(1.0, 0.5)})
        await stage.lead()
        for n in range(MAX_NEWS + 1):
            await stage.submit(f"t{n}", tenant=f"team{n}", not_before=LATER)
        fleet = stage.leader.fleet
        assert fleet is not None
        await fleet.look()
        for expected in (MAX_NEWS, 1, 0):
            found = fleet.take()
            assert len(found) == expected
            fleet.told(found)


async def test_a_template_whose_task_has_failed_pauses(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        stage.fleet_rules, now = FleetRules(), stage.clock.now()
        await stage.store.put_token(
            TokenRow("ops", "red", ("*",), 100, sha256="hash", created_at=now), by="ops"
        )
        template = Template("sweep", Demand(gpus=1), 1, 8)
        await stage.store.put_idle_template(IdleTemplate(template, "red", "{}", "hash", "ops", now))
        await stage.lead()
        await stage.submit("t", name="idle/sweep", priority=0, seconds=1e6, gpu_mb=GIB)
        await stage.turns_until("t", TaskState.RUNNING)
        fault, at = Failure("exception", "ValueError"), stage.clock.now()
        await stage.hear(Ended(TaskId("t"), Fence(1), at, Ending.FAILED, failure=fault))
        fleet = stage.leader.fleet
        assert fleet is not None
        await fleet.look()
        [seen] = fleet.seen.templates
        assert seen.paused_until is not None


async def test_events_committed_before_the_database_left_are_counted_once(
    tmp_path: Path,
) -> None:
    async with a_stage(tmp_path) as stage:
        high = Threshold(90.0, 80.0)
        stage.fleet_rules = FleetRules(thresholds={"disk_percent": high, "host_memory_percent": high})
        await stage.lead()
        fleet, told = stage.leader.fleet, list[Event]()
        assert fleet is not None
        stage.store.listen(told.extend)
        stage.host = HostUse(95.0, 95.0)
        await fleet.look()
        stage.forgetful.until_away = 1
        with pytest.raises(StoreUnavailable):
            await stage.leader.cycle()
        stage.forgetful.come_back()
        await stage.leader.cycle()
        assert [one.key for one in told if one.kind.startswith("fleet.")] == [
            "disk_percent", "host_memory_percent",
        ]  # fmt: skip
        with pytest.raises(StoreUnavailable):
            await three_lack_memory(stage, until_away=1)
        stage.forgetful.come_back()
        await look(stage)
        assert [one.times for one in fleet.seen.memory_failures] == [3]


async def three_lack_memory(stage: Stage, until_away: int | None = None) -> None:
    full = Failure("exception", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    for id in "abc":
        await stage.submit(id, name="train", seconds=1e6, gpu_mb=GIB)
    for id in "abc":
        await stage.turns_until(id, TaskState.RUNNING)
    now, stage.forgetful.until_away = stage.clock.now(), until_away
    await stage.hear(*(Ended(TaskId(id), Fence(1), now, Ending.FAILED, failure=full) for id in "abc"))


async def test_runs_that_fail_again_and_again_for_lack_of_memory_are_published(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        stage.fleet_rules = FleetRules()
        await stage.lead()
        await three_lack_memory(stage)
        await look(stage)
        fleet = stage.leader.fleet
        assert fleet is not None
        [found] = fleet.seen.memory_failures
        assert (found.memory, found.name, found.times) == ("cuda", "train", 3)


class RefusingStore(ForgetfulStore):
    """Cannot store what it is told of failures for lack of memory."""

    async def commit(self, term: Term, decisions: Sequence[Decision]) -> Sequence[CommitVerdict]:
        fits = [one.outcome is None or memory_of(one.outcome.failure) is None for one in decisions]
        written = await super().commit(term, [one for one, fit in zip(decisions, fits, strict=True) if fit])
        verdicts = iter(written)
        return [next(verdicts) if fit else CommitVerdict.UNSTORABLE for fit in fits]


async def test_what_the_database_refused_counts_as_no_failure(tmp_path: Path) -> None:
    async with a_stage(tmp_path, RefusingStore(Hands())) as stage:
        stage.fleet_rules = FleetRules()
        await stage.lead()
        await three_lack_memory(stage)
        assert [(await stage.row(id)).state for id in "abc"] == [TaskState.FAILED] * 3
        await look(stage)
        fleet = stage.leader.fleet
        assert fleet is not None
        assert fleet.seen.memory_failures == ()


async def test_work_of_tasks_arrays_and_workers_is_counted_and_its_rate_logged(
    tmp_path: Path,
) -> None:
    async with a_stage(tmp_path) as stage:
        stage.fleet_rules = FleetRules(throughput=ThroughputRules(Seconds(10.0), least_per_second=0.2))
        await stage.lead()
        await look(stage)
        fleet, told = stage.leader.fleet, list[Event]()
        assert fleet is not None
        stage.store.listen(told.extend)
        await stage.submit("short", seconds=1.0, gpu_mb=GIB)
        await stage.submit("worker", seconds=1e6, gpu_mb=GIB)
        await stage.turns_until("worker", TaskState.RUNNING)
        for answered, fence in ((5, 1), (5, 1), (3, 2)):
            await stage.hear(
                Loaded(TaskId("worker"), Fence(fence), stage.clock.now(), 0, 0, 1.0, 0, answered)
            )
        pages = tuple(ItemPage(TaskId("array"), 0, n, "acme", 7, 1, stage.clock.now(), b"") for n in (1, 2))
        fleet.on_committed([Decision("array", "items", items=pages)])
        await look(stage, 10.0)
        await stage.turns_until("short", TaskState.SUCCEEDED)
        assert fleet.seen.done == {
            "submitted": 2, "admitted": 2, "started": 2, "finished": 1, "array_items": 14, "inferences": 0,
            "worker_calls": 8,
        }  # fmt: skip
        rates = {one.key: one.fields["items_per_second"] for one in told if one.kind == "fleet.THROUGHPUT"}
        assert rates == {
            "submitted": 0.2, "admitted": 0.2, "started": 0.2, "array_items": 1.4, "worker_calls": 0.8,
        }  # fmt: skip


async def test_given_up_node_has_left_and_one_known_before_has_not_joined(
    tmp_path: Path,
) -> None:
    async with a_stage(tmp_path) as stage:
        for _ in range(2):  # leaders
            await stage.lead()
            await look(stage)
            assert stage.leader.fleet is not None
            assert set(stage.leader.fleet.seen.events.values()) == {0}
        node = stage.world.nodes[NodeName("n1")]
        await stage.hear(NodeLost(node.name, node.incarnation, stage.clock.now(), "no beat", confirmed=True))
        fleet = stage.leader.fleet
        assert fleet is not None
        await fleet.look()
        await stage.leader.cycle()
        assert fleet.seen.events["fleet.NODE_LEFT"] == 1


async def test_calls_answered_under_the_last_leader_are_not_counted_again(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        await stage.submit("worker", seconds=1e6, gpu_mb=GIB)
        await stage.turns_until("worker", TaskState.RUNNING)
        await stage.later(5.0)
        await stage.lead()
        for answered in (40, 43):
            await stage.hear(Loaded(TaskId("worker"), Fence(1), stage.clock.now(), 0, 0, 1.0, 0, answered))
        assert stage.leader.fleet is not None
        assert stage.leader.fleet.seen.done["worker_calls"] == 3


async def test_a_report_that_comes_after_the_end_of_its_run_is_not_kept(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        await stage.lead()
        ended = holding(a_task("worker"), state=TaskState.FAILED, started_at=stage.clock.now())
        stage.world.add_task(ended.task)
        await stage.hear(Loaded(TaskId("worker"), Fence(1), stage.clock.now(), 0, 0, 1.0, 0, 40))
        assert stage.leader.fleet is not None
        assert stage.leader.fleet.seen.done["worker_calls"] == 0
