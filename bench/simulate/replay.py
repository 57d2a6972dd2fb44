"""One replay: the core decides, runs last as long as they last, and the clock jumps from event to event."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from math import inf
from statistics import mean

from gpubroker_server.core.domain.decisions import AnyOrder, Decision
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.device import DeviceSample
from gpubroker_server.core.domain.orders import (
    Ended,
    Ending,
    Gone,
    GoOrder,
    Ready,
    Report,
    Started,
    StartOrder,
    StopOrder,
)
from gpubroker_server.core.domain.policy import BANDS, Policy, band_of
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Fence, Instant, Mib, Position, Seconds, TaskId
from gpubroker_server.core.lifecycle.deadlines import Watch, due, keep_watch
from gpubroker_server.core.lifecycle.learning import learn
from gpubroker_server.core.lifecycle.runs import react
from gpubroker_server.core.planning.backfill import Forecast
from gpubroker_server.core.planning.consolidation import Consolidation
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.forecasts import make_forecasts
from gpubroker_server.core.planning.fragmentation import Sum, fragmentation
from gpubroker_server.core.planning.memory import Memory
from gpubroker_server.core.world.dependencies import settle
from gpubroker_server.core.world.events import NewEvent, events_of, submitted
from gpubroker_server.core.world.world import World

from bench.measuring import percentile
from bench.simulate.work import Scene, Work

START_SECONDS = 0.1
SAVE_SECONDS = 1.0
"""What a run that checkpoints needs to save and leave when it is told to."""
LOOK_SECONDS = 60.0
WIDE_GPUS = 8
"""Tasks of so many GPUs are looked at by themselves: small ones must not keep them waiting."""
FOR_EVER = Seconds(1e12)


@dataclass
class Seen:
    """What came of it. GPU-seconds count each GPU that a run was on."""

    capacity_mb: int
    seconds: float = 0.0
    """From the first submit to the last: what the means over time are taken over."""
    leased_mb_seconds: float = 0.0
    free_mb_seconds: float = 0.0
    stranded_mb_seconds: float = 0.0
    """Free, and of no use to what was usually asked for by then; looked at once a minute."""
    waits: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Band -> seconds from submit to first admission."""
    tenants: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Tenant -> GPU-MiB-seconds that it held, to the very end."""
    preemptions: int = 0
    lost_gpu_seconds: float = 0.0
    ended: int = 0
    expired: int = 0
    drained_seconds: float = 0.0
    """From the last submit to the end of the last run."""

    def figures(self) -> dict[str, tuple[float, str]]:
        """Metric -> (value, unit)."""
        whole = self.capacity_mb * self.seconds or 1.0
        told = {
            "utilisation": (100 * self.leased_mb_seconds / whole, "%"),
            "fragmentation": (100 * self.stranded_mb_seconds / (self.free_mb_seconds or 1.0), "% of free"),
            "preemptions": (float(self.preemptions), ""),
            "expired": (float(self.expired), ""),
            "lost_gpu_h": (self.lost_gpu_seconds / 3600.0, "h"),
            "drained": (self.drained_seconds / 3600.0, "h"),
        }
        for name in (*(name for name, _, _ in BANDS), "batch, 8 GPUs"):
            waits = self.waits.get(name)
            if waits:
                told[f"wait.{name}.mean"] = (mean(waits), "s")
                told[f"wait.{name}.p90"] = (percentile(waits, 90), "s")
        held = sum(self.tenants.values())
        for tenant in sorted(self.tenants) if len(self.tenants) > 1 else ():
            told[f"share.{tenant}"] = (100 * self.tenants[tenant] / held, "% of use")
        return told


@dataclass
class Run:
    work: Work
    fence: Fence
    ranks: set[int] = field(default_factory=set)
    """Those whose process is there or on its way."""
    began: float | None = None
    """When its work began: of a gang, when all ranks were ready."""


class Replay:
    """Every accepted task ends, or `run` raises RuntimeError: a demand that never fits has no place here."""

    def __init__(self, scene: Scene, policy: Policy) -> None:
        self._policy = replace(policy, sample_period_seconds=FOR_EVER)
        self._works = {work.task.id: work for work in scene.works}
        self._left = {work.task.id: work.seconds for work in scene.works}
        self._last_submit = scene.works[-1].task.submitted_at
        self._now = Instant(scene.works[0].task.submitted_at)
        self._moments: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        self._runs: dict[TaskId, Run] = {}
        self._reports: list[Report] = []
        self._watch: Watch | None = None
        self._memory = Memory()
        self._forecasts: list[Forecast] = []
        self._consolidation = Consolidation()
        self._first_submit = self._now
        self._measured_at = float(self._now)
        self._looked_at, self._free = -inf, Sum()
        self.world = World()
        self.seen = Seen(sum(device.allocatable_mb for device in scene.devices))
        for node in scene.nodes:
            self.world.add_node(replace(node, ready=True))
        for device in scene.devices:
            self.world.add_device(device)
        self.world.measure(DeviceSample(device.key, self._now, Mib(0)) for device in scene.devices)
        for work in scene.works:
            self._at(work.task.submitted_at, self._submission_of(work))

    def run(self, tell: Callable[[str], None] = lambda _: None) -> Seen:
        """`tell` hears after each tenth of the time in which tasks come how far it has come."""
        told, span = 0, float(self._last_submit - self._first_submit) or 1.0
        while self._moments:
            tenths = min(10, int(10 * (self._moments[0][0] - self._first_submit) / span))
            if tenths > told:
                told = tenths
                tell(f"{10 * told} % of the time, {self.seen.ended:,} tasks have ended")
            moment = self._moments[0][0]
            self._count_until(moment)
            self._now = Instant(moment)
            while self._moments and self._moments[0][0] <= moment:
                heappop(self._moments)[2]()
            self._turn()
        if self.world.tasks:
            stuck = ", ".join(sorted(self.world.tasks)[:3])
            raise RuntimeError(f"{len(self.world.tasks)} tasks never ended, {stuck} among them")
        self.seen.seconds = float(self._last_submit - self._first_submit)
        self.seen.drained_seconds = float(self._now - self._last_submit)
        return self.seen

    def _at(self, moment: float, happens: Callable[[], None]) -> None:
        heappush(self._moments, (moment, next(self._number), happens))

    def _submission_of(self, work: Work) -> Callable[[], None]:
        def submit() -> None:
            self._append([submitted(work.task)])
            self._look_again(work.task)

        return submit

    def _look_again(self, task: Task) -> None:
        """When time alone will change something for it."""
        for moment in (task.not_before, task.waits_until, task.stop_deadline_at):
            if moment is not None and moment > self._now and not task.is_terminal:
                self._at(moment, lambda: None)

    def _turn(self) -> None:
        """What a leader does in one cycle."""
        reports, self._reports = self._reports, []
        self._carry_out(learn(self.world, react(self.world, reports, self._now, self._policy), self._now))
        self._carry_out(due(self.world, self._now, self._policy, self._watch))
        self._watch = keep_watch(self._watch, self._now)
        while decisions := settle(self.world, self._now):
            self._carry_out(decisions)
        cursor = None
        while True:
            plan = plan_cycle(
                self.world, self._policy, self._now, cursor, memory=self._memory, forecasts=self._forecasts
            )
            self._carry_out(plan.decisions)
            cursor = plan.cursor
            if cursor is None:
                break
        move = self._consolidation.look(self.world, self._policy, self._now, self._forecasts)
        if move is not None:
            self._carry_out([move])
            self._consolidation.count(move, self._now)
        *_, self._forecasts = make_forecasts(self.world, self._policy, self._now, self._forecasts)

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            self._append(events_of(decision))
            for write in decision.tasks:
                task = write.task
                if task.state is TaskState.ADMITTED and task.fence == 1:
                    wait = self._now - task.submitted_at
                    self.seen.waits[band_of(task.priority)[0]].append(wait)
                    if task.demand.gpus == WIDE_GPUS and band_of(task.priority)[0] == "batch":
                        self.seen.waits["batch, 8 GPUs"].append(wait)
                self.seen.preemptions += "preemptions" in write.changed
                self.seen.ended += task.is_terminal
                self.seen.expired += task.state is TaskState.EXPIRED
                self._look_again(task)
            for order in decision.orders:
                self._obey(order)

    def _append(self, events: Iterable[NewEvent]) -> None:
        for event in events:
            self.world.apply([event.at(Position(self.world.position + 1), self._now)])

    def _obey(self, order: AnyOrder) -> None:
        match order:
            case StartOrder():
                run = self._runs.get(order.task)
                if run is None or run.fence != order.fence:
                    run = self._runs[order.task] = Run(self._works[order.task], order.fence)
                run.ranks.add(order.rank)
                self._at(self._now + START_SECONDS, lambda: self._start(run, order))
            case GoOrder() if order.rank == 0:
                self._go(self._runs[order.task])
            case StopOrder():
                self._stop(self._runs[order.task], order.rank)
            case _:
                pass

    def _start(self, run: Run, order: StartOrder) -> None:
        """Its process is there; ranks of a gang wait for each other."""
        if order.rank in run.ranks:
            self._reports.append(Started(order.task, run.fence, self._now, 1, order.rank))
            if order.barrier:
                self._reports.append(Ready(order.task, run.fence, self._now, "10.0.0.1:1", order.rank))
            else:
                self._go(run)

    def _go(self, run: Run) -> None:
        if run.began is None:
            run.began = float(self._now)
            self._at(run.began + self._left[run.work.task.id], lambda: self._finish(run))

    def _finish(self, run: Run) -> None:
        for rank in sorted(run.ranks):
            self._end(run, rank, Ending.SUCCEEDED)

    def _stop(self, run: Run, rank: int) -> None:
        """Told to leave, with the others of its gang; once all are gone, what was done is counted."""
        takes = SAVE_SECONDS if run.work.checkpoints else 0.0
        self._at(self._now + takes, lambda: self._end(run, rank, Ending.STOPPED))

    def _end(self, run: Run, rank: int, ending: Ending) -> None:
        """The first end of a rank counts: one that came to its own end had nothing left to stop."""
        if rank not in run.ranks:
            return
        run.ranks.remove(rank)
        task = run.work.task
        self._reports.append(Ended(task.id, run.fence, self._now, ending, rank=rank))
        self._reports.append(Gone(task.id, run.fence, self._now, "process_absent", rank=rank))
        if ending is Ending.STOPPED and not run.ranks and run.began is not None:
            done = self._now - run.began
            if run.work.checkpoints:
                self._left[task.id] = max(0.001, self._left[task.id] - done)
            else:
                self.seen.lost_gpu_seconds += done * _gpus(task.demand)

    def _count_until(self, moment: float) -> None:
        """Add up what was leased and stranded since the last look; means only while tasks were coming."""
        whole = moment - self._measured_at
        for tenant in self.world.accounts:
            self.seen.tenants[tenant] += whole * self.world.accounts.held_mb(tenant)
        passed = min(moment, self._last_submit) - self._measured_at
        if passed > 0:
            self._look_at_what_is_free()
            leased = sum(book.leased_mb() for book in self.world.books.values())
            self.seen.leased_mb_seconds += passed * leased
            self.seen.free_mb_seconds += passed * self._free.free_mb
            self.seen.stranded_mb_seconds += passed * self._free.stranded_mb
        self._measured_at = float(moment)

    def _look_at_what_is_free(self) -> None:
        if self._now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = float(self._now)
            self._free = fragmentation(self.world, self._policy, self._now).total


def _gpus(demand: Demand) -> int:
    return demand.gpus + sum(bundle.gpus for bundle in demand.bundles)
