"""A day of a small cluster with fewer tasks at night, with and without templates that fill its idle GPUs."""

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from statistics import mean, median, quantiles

from gpubroker_server.broker.fleet import FleetKeeper, HostUse
from gpubroker_server.core.control.fleet import FleetRules
from gpubroker_server.core.control.idle_templates import NAME_PREFIX, Template
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Seconds, TaskId
from gpubroker_server.core.world.background import IDLE_TOP
from gpubroker_server.core.world.events import Event
from gpubroker_server.ports.idle_templates import IdleTemplate
from gpubroker_server.ports.store import AdmittedTask, RunSpec, TokenRow
from msgspec import Struct

from tests.simulation.day import POLICY, START, Day, SteadyLoop
from tests.simulation.machine import Program

TEMPLATES = (Template("sweep", Demand(gpus=1), 3, 8), Template("eval", Demand(gpus=1), 1, 8))
WORK_SECONDS = 900.0
"""Of a template's task, on average."""
NIGHT_PAUSES = 10.0
"""So many times longer are the pauses between two tasks in the first and the last quarter of the day."""
LOOK_SECONDS = 2.0
NOTICE_SECONDS = Seconds(10.0)
"""That a template's task gets before it has to make room."""


class DayUse(Struct, frozen=True):
    held: float
    """Share of the time of all GPUs in which something had a lease of them; 0 to 1."""
    held_otherwise: float
    """The part of it in which more than idle work had one."""
    waits: dict[str, float]
    """Seconds until its first admission, of each task above the idle band that waited for room only."""
    preempted: int


def use_of(seed: int, hours: float, *, fills: bool) -> DayUse:
    """Raises Violation."""
    with asyncio.Runner(loop_factory=SteadyLoop) as runner:
        day = IdleDay(seed, hours, fills=fills)
        runner.run(day.run())
    total = day.seconds * sum(map(len, day.devices()))
    return DayUse(day.held_seconds / total, day.other_seconds / total, day.waits, day.preempted)


def waits_of(with_templates: DayUse, without: DayUse) -> dict[str, tuple[float, float]]:
    """Median, mean and 95th percentile (with, without), in seconds, of tasks admitted on both days."""
    both = sorted(with_templates.waits.keys() & without.waits.keys())
    one, other = ([day.waits[task] for task in both] for day in (with_templates, without))
    return {
        "median": (median(one), median(other)),
        "mean": (mean(one), mean(other)),
        "p95": (quantiles(one, n=20)[-1], quantiles(other, n=20)[-1]),
    }


class IdleDay(Day):
    """Nothing breaks, so that the two days differ in the templates alone."""

    def __init__(self, seed: int, hours: float, *, fills: bool) -> None:
        super().__init__(seed, hours)
        self.new_fleet = self._keeper
        self._fills = fills
        self._work = Random(f"{seed}/templates")
        self._looked_at = self._timeline.now()
        self.seconds = self.held_seconds = self.other_seconds = 0.0
        self.waits: dict[str, float] = {}
        self.preempted = 0

    def devices(self) -> Sequence[Sequence[object]]:
        return [machine.devices for machine in self._cluster.machines.values()]

    def _keeper(self, commit_seconds: Callable[[], float]) -> FleetKeeper:
        host = HostUse(10.0, 20.0)
        return FleetKeeper(
            FleetRules(), self._world, POLICY, self._timeline, lambda: host, commit_seconds, self._store
        )

    async def _lead(self) -> None:
        if self._fills:
            await self._store.put_token(
                TokenRow("ops", "red", ("*",), 100, sha256="hash", created_at=Instant(START)), by="ops"
            )
            for one in TEMPLATES:
                await self._store.put_idle_template(
                    IdleTemplate(one, "red", "{}", "hash", "ops", Instant(START))
                )
        await super()._lead()

    async def _live_until_all_is_done(self) -> None:
        """No longer than to the end of the day, which is what is measured."""
        while self._timeline.now() < self._end:
            await self._step()

    def _plan_faults(self) -> None:
        """None."""

    def _arrive_later(self) -> None:
        quarter = (self._timeline.now() - START) / (self._end - START) * 4
        factor = 1.0 if 1 <= quarter < 3 else NIGHT_PAUSES
        self._timeline.after(self._workload.pause_seconds() * factor, self._arrive)

    def _on_events(self, events: Sequence[Event]) -> None:
        super()._on_events(events)
        if self._leader is not None and self._leader.fleet is not None:
            self._leader.fleet.on_events(events)
        for event in events:
            task = self._world.tasks.get(TaskId(event.key))
            if event.kind == "task.requeued" and task is not None and task.name.startswith(NAME_PREFIX):
                self.preempted += 1
            if (
                event.kind == "task.admitted"
                and task is not None
                and task.priority > IDLE_TOP
                and not task.after
            ):
                earliest = max(task.submitted_at, task.not_before or task.submitted_at)
                self.waits.setdefault(task.id, event.at - earliest)

    async def _turn(self) -> None:
        now = self._timeline.now()
        if now - self._looked_at >= LOOK_SECONDS and self._leader is not None:
            self._measure(now - self._looked_at)
            self._looked_at = now
            assert self._leader.fleet is not None
            await self._leader.fleet.look()
            await self._submit_missing()
        await super()._turn()

    def _measure(self, seconds: float) -> None:
        self.seconds += seconds
        for ledger in self._world.ledgers.values():
            held = [holding.lease.priority for holding in ledger.holdings.values()]
            self.held_seconds += seconds * bool(held)
            self.other_seconds += seconds * any(priority > IDLE_TOP for priority in held)

    async def _submit_missing(self) -> None:
        """As a gateway does."""
        assert self._leader is not None
        assert self._leader.fleet is not None
        demands = {one.name: one.demand for one in TEMPLATES}
        for seen in self._leader.fleet.seen.templates:
            for number in range(seen.number, seen.number + seen.missing):
                await self._submit_idle(seen.name, demands[seen.name], number)

    async def _submit_idle(self, name: str, demand: Demand, number: int) -> None:
        now, id = self._timeline.now(), TaskId(f"{name}-{number:05}")
        task = Task(
            id=id,
            tenant="red",
            name=f"{NAME_PREFIX}{name}",
            priority=0,
            demand=demand,
            submitted_at=now,
            grace_seconds=NOTICE_SECONDS,
            queue_ttl_seconds=Seconds(60.0),
            expires_at=Instant(now + 60.0),
        )
        self._programs[id] = Program(
            self._work.expovariate(1 / WORK_SECONDS), saves_every_seconds=60.0, leaves_after_seconds=1.0
        )
        await self._store.submit(AdmittedTask(task, RunSpec("command"), f"{name}/{number}", "body"))
