"""Fleet control of one term. It examines the fleet every few seconds, beside the cycles. A cycle takes over
the results, so that nothing changes in the middle of a plan."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass
from typing import NamedTuple

from msgspec.structs import replace

from gpubroker_server.core.control.backpressure import longest_wait_seconds
from gpubroker_server.core.control.finding_dates import dates_of, known_dates
from gpubroker_server.core.control.findings.finding import Finding, remember
from gpubroker_server.core.control.fleet import FleetControl, FleetRules, FleetSeen, background_room
from gpubroker_server.core.control.throughput import CALLS, ITEMS, Throughput
from gpubroker_server.core.domain.decisions import Decision, Notice
from gpubroker_server.core.domain.holders import Inference, Model
from gpubroker_server.core.domain.interval import Interval
from gpubroker_server.core.domain.orders import Loaded, Report
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Move, Task
from gpubroker_server.core.domain.units import DeviceKey, Instant, Seconds, TaskId
from gpubroker_server.core.lifecycle.gpu_closures import by_failures
from gpubroker_server.core.world.background import BackgroundRoom
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.idle_templates import IdleTemplates
from gpubroker_server.ports.store import Clock, StoreUnavailable

COUNTED = (
    "fleet.BACKPRESSURE_ACTIVATED",
    "fleet.BACKPRESSURE_RELEASED",
    "fleet.DISK_CLEANED",
    "fleet.DISK_DRY_RUN",
    "fleet.DISK_SPACE_LOW",
    "fleet.IDLE_RESOURCE_DETECTED",
    "fleet.NODE_JOINED",
    "fleet.NODE_LEFT",
    "fleet.NODE_OVERLOADED",
    "fleet.RESOURCE_CONSTRAINT",
    "fleet.THROUGHPUT",
    "memory.defragmented",
    "memory.fragmented",
    "worker.joined",
    "worker.left",
)
"""Kinds of events about the health of the fleet, in the order of their names."""

MAX_NEWS = 200
"""The most notices that one cycle commits. They delay the plan of the cycle, and a whole fleet may become
idle at once."""

DIAGNOSIS_SECONDS = Seconds(10.0)
"""The time between two diagnoses. They note since when each finding holds, for the next leader and every
gateway."""

ANSWER_SECONDS = 2.0
"""The longest wait for the use of this host's disks. After it the fleet is examined without that value."""

_MOVES: Mapping[str, Move] = {f"task.{move}": move for move in Move}
"""The move of a task that each kind of event announces."""


class HostUse(NamedTuple):
    """The use of the machine of this process, in percent. A value is None if it is not known."""

    disk_percent: float | None
    """The used share of the fullest disk that the service writes to."""
    memory_percent: float | None


@dataclass(eq=False)
class FleetKeeper:
    rules: InitVar[FleetRules]
    world: World
    policy: Policy
    clock: Clock
    host_use: Callable[[], HostUse]
    commit_seconds: Callable[[], float]
    """Returns the seconds that commits take now."""
    templates: IdleTemplates
    before: InitVar[FleetSeen | None] = None
    """The state of the fleet that the last leader published."""
    diagnose: Callable[[FleetSeen], Iterable[Finding]] = lambda _fleet: ()
    """Returns the findings about the fleet."""

    def __post_init__(self, rules: FleetRules, before: FleetSeen | None) -> None:
        self._control = FleetControl(rules, self.policy, before)
        self._asked: asyncio.Future[HostUse] | None = None
        """The call of `host_use` that has not returned yet."""
        self._closes_failing_gpus = rules.failing_gpus.close
        self._watches_admission = "admission_seconds" in rules.thresholds
        self._news: list[Notice] = []
        self._room: BackgroundRoom | None = None
        """The room for background work that was computed last, until a cycle takes it over."""
        self._diagnosis_pace = Interval(DIAGNOSIS_SECONDS)
        self._dates = known_dates(() if before is None else before.dates)
        """The time when each present finding was first seen."""
        self._told_dates = dates_of(self._dates)
        """The same times in the form in which the leader publishes them."""
        self._began_at = self.clock.now()
        self._events = dict.fromkeys(COUNTED, 0)
        self._throughput = Throughput(rules.throughput)
        self._control.nodes.expect(node.name for node in self.world.nodes.values() if node.ready)
        for task in self.world.tasks.values():
            self._control.fill.note(task, is_new=False)

    @property
    def seen(self) -> FleetSeen:
        counts = {"done": dict(self._throughput.done), "events": dict(self._events)}
        return replace(self._control.seen, dates=self._told_dates, **counts)

    async def keep(self, between_cycles: asyncio.Event) -> None:
        """Examine the fleet at intervals, until cancelled. An examination takes milliseconds, so it waits
        until a cycle that is under way has ended, but at most one sample period: slow commits must be
        noticed."""
        period_seconds = self.policy.sample_period_seconds
        while True:
            host = await self._ask()
            with suppress(TimeoutError):
                async with asyncio.timeout(period_seconds):
                    await between_cycles.wait()
            self._step(host)
            await asyncio.sleep(period_seconds)

    async def look(self) -> None:
        self._step(await self._ask())

    async def _ask(self) -> HostUse:
        if self._asked is None:
            self._asked = asyncio.ensure_future(asyncio.to_thread(self.host_use))
        done, _ = await asyncio.wait([self._asked], timeout=ANSWER_SECONDS)
        host = HostUse(None, None)
        if done:
            host, self._asked = self._asked.result(), None
        now = self.clock.now()
        if self._control.is_idle_check_due(now):
            with suppress(StoreUnavailable):  # the last templates stay in use
                idle_templates = await self.templates.idle_templates(now)
                self._control.fill.templates = [idle.template for idle in idle_templates]
        return host

    def _step(self, host: HostUse) -> None:
        now = self.clock.now()
        self._news += self._control.step(self.world, self._pressures(host, now), now)
        self._news += self._throughput.follow(now)
        self._room = background_room(self.world, self.policy, self.seen.background_mb)
        if self._diagnosis_pace.is_due(now):
            self._diagnosis_pace.done(now)
            self._dates = remember(self._dates, list(self.diagnose(self.seen)), now)[1]
            self._told_dates = dates_of(self._dates)

    def take(self) -> Sequence[Decision]:
        """Apply the results since the last cycle to the World. Returns the decisions that announce them; a
        notice is returned again by the next call unless `told` is called."""
        if self._room is not None:
            self.world.control(self._room, self.seen.full_disks, self.seen.stream_weights)
            self._room = None
        decisions = [Decision(notice.key, "fleet", notices=(notice,)) for notice in self._news[:MAX_NEWS]]
        if self._closes_failing_gpus and (failing := self._control.seen.failing):
            decisions += by_failures(self.world, failing, self.clock.now())
        return decisions

    def told(self, decisions: Sequence[Decision]) -> None:
        """Forget the notices of these decisions, because they are committed or the database will never
        accept them."""
        published = {id(notice) for decision in decisions for notice in decision.notices}
        self._news = [notice for notice in self._news if id(notice) not in published]

    def on_committed(self, decisions: Sequence[Decision]) -> None:
        """Forget committed notices, and count memory failures and results of items."""
        self.told(decisions)
        self._control.memory_failures.note(decisions)
        self._throughput.done[ITEMS] += sum(page.count for decision in decisions for page in decision.items)

    def hear(self, reports: Sequence[Report]) -> None:
        """Count the calls that workers have answered, and failures of GPUs. Calls that a worker answered
        before this leader began are not counted."""
        self._control.failing_gpus.note(self.world, reports)
        for report in reports:
            row = self.world.tasks.get(report.task) if isinstance(report, Loaded) else None
            if isinstance(report, Loaded) and row is not None and not row.is_terminal:
                if (before := self._control.loads.get(report.task)) is not None:
                    counted = before.answered if before.fence == report.fence else 0
                else:
                    is_older = row.started_at is not None and row.started_at < self._began_at
                    counted = report.answered if is_older else 0
                self._control.loads[report.task] = report
                self._throughput.done[CALLS] += max(0, report.answered - counted)

    def on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            transition = _MOVES.get(event.kind)
            if transition is None:
                if event.kind == "gpu.reopened":
                    self._control.failing_gpus.forget(DeviceKey(event.key))
                elif event.kind in self._events:
                    self._events[event.kind] += 1
                continue
            task = event.task or self.world.tasks.get(TaskId(event.key))
            match task:
                case Task(holder=Model()):
                    pass  # a model is no task, though its row moves like one
                case Task(holder=Inference()):
                    self._throughput.moved(transition, is_inference=True)
                case _:
                    self._throughput.moved(transition, is_inference=False)
            if task is None:
                continue
            if transition is Move.SUBMITTED:
                self._control.fill.note(task, is_new=True)
            elif task.is_terminal:
                self._control.loads.pop(task.id, None)
                self._control.fill.end(task, event.at)

    def _pressures(self, host: HostUse, now: Instant) -> Mapping[str, float | None]:
        pending = self.world.pending - self.world.pending_held
        return {
            "queue_length": float(pending.total()),
            "admission_seconds": longest_wait_seconds(self.world, now) if self._watches_admission else None,
            "store_seconds": self.commit_seconds(),
            "disk_percent": host.disk_percent,
            "host_memory_percent": host.memory_percent,
            **{
                pressure.name: 0.0
                for pressure in self._control.seen.pressures
                if pressure.name.startswith("queue:")
            },
            **{f"queue:{tenant}": float(count) for tenant, count in pending.items()},
        }
