"""A replay of a workload: the core decides, and the clock jumps from event to event."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf
from statistics import mean

from gpubroker_server.core.domain.decisions import AnyOrder, Decision
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.device import DeviceSample
from gpubroker_server.core.domain.lease import Proof
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
from gpubroker_server.core.lifecycle.deadlines import ObservationWindow, due, extend_window
from gpubroker_server.core.lifecycle.learning import learn
from gpubroker_server.core.lifecycle.runs import apply_reports
from gpubroker_server.core.planning.consolidation import Consolidation
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.forecasts.forecasts import make_forecasts
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from gpubroker_server.core.planning.fragmentation import FreeMemory, fragmentation
from gpubroker_server.core.planning.plan_cache import PlanCache
from gpubroker_server.core.world.dependencies import settle_dependencies
from gpubroker_server.core.world.events import NewEvent, events_of, submitted
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from bench.measuring import percentile
from bench.simulate.workload import Job, Workload

START_SECONDS = 0.1
CHECKPOINT_SECONDS = 1.0
"""The seconds that a run with checkpoints needs to save and stop after its notice."""
SAMPLE_SECONDS = 60.0
"""The seconds between two samples of fragmentation."""
WIDE_GPUS = 8
"""The number of GPUs from which waits of batch tasks are reported separately."""
FOREVER = Seconds(1e12)


@dataclass
class Outcome:
    """The results of a replay. GPU-seconds count each GPU of a run."""

    capacity_mb: int
    seconds: float = 0.0
    """The seconds from the first submit to the last, over which means are taken."""
    leased_mb_seconds: float = 0.0
    free_mb_seconds: float = 0.0
    stranded_mb_seconds: float = 0.0
    """The free memory that usual demands could not use, sampled once a minute, in MiB × seconds."""
    waits: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Band -> the seconds from submit to first admission of each task."""
    tenants: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Tenant -> the MiB × seconds that it held until the last run ended."""
    preemptions: int = 0
    lost_gpu_seconds: float = 0.0
    ended: int = 0
    expired: int = 0
    drained_seconds: float = 0.0
    """The seconds from the last submit to the end of the last run."""

    def figures(self) -> dict[str, tuple[float, str]]:
        """Return metric -> (value, unit)."""
        whole = self.capacity_mb * self.seconds or 1.0
        values = {
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
                values[f"wait.{name}.mean"] = (mean(waits), "s")
                values[f"wait.{name}.p90"] = (percentile(waits, 90), "s")
        held = sum(self.tenants.values())
        for tenant in sorted(self.tenants) if len(self.tenants) > 1 else ():
            values[f"share.{tenant}"] = (100 * self.tenants[tenant] / held, "% of use")
        return values


@dataclass
class Run:
    job: Job
    fence: Fence
    ranks: set[int] = field(default_factory=set)
    """The ranks whose process is running or starting."""
    began: float | None = None
    """The time at which its work started; for a gang, the time at which all ranks were ready."""


class Replay:
    """Replays a workload under a policy. Every task has to fit; otherwise `run` raises RuntimeError."""

    def __init__(self, workload: Workload, policy: Policy) -> None:
        self._policy = replace(policy, sample_period_seconds=FOREVER)
        self._jobs = {job.task.id: job for job in workload.jobs}
        self._left = {job.task.id: job.seconds for job in workload.jobs}
        self._last_submit = workload.jobs[-1].task.submitted_at
        self._now = Instant(workload.jobs[0].task.submitted_at)
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        self._runs: dict[TaskId, Run] = {}
        self._reports: list[Report] = []
        self._watch: ObservationWindow | None = None
        self._cache = PlanCache()
        self._forecasts: list[Forecast] = []
        self._consolidation = Consolidation()
        self._first_submit = self._now
        self._measured_at = float(self._now)
        self._sampled_at, self._free = -inf, FreeMemory()
        self.world = World()
        self.outcome = Outcome(sum(device.allocatable_mb for device in workload.devices))
        for node in workload.nodes:
            self.world.add_node(replace(node, ready=True))
        for device in workload.devices:
            self.world.add_device(device)
        self.world.measure(DeviceSample(device.key, self._now, Mib(0)) for device in workload.devices)
        for job in workload.jobs:
            self._at(job.task.submitted_at, self._submission_of(job))

    def run(self, report: Callable[[str], None] = lambda _: None) -> Outcome:
        """Run the replay and return its outcome. `report` gets the progress after each tenth of the submit
        times."""
        reported, span = 0, float(self._last_submit - self._first_submit) or 1.0
        while self._timers:
            tenths = min(10, int(10 * (self._timers[0][0] - self._first_submit) / span))
            if tenths > reported:
                reported = tenths
                report(f"{10 * reported} % of the time, {self.outcome.ended:,} tasks have ended")
            moment = self._timers[0][0]
            self._advance_to(moment)
            self._now = Instant(moment)
            while self._timers and self._timers[0][0] <= moment:
                heappop(self._timers)[2]()
            self._turn()
        if self.world.tasks:
            stuck = ", ".join(sorted(self.world.tasks)[:3])
            raise RuntimeError(f"{len(self.world.tasks)} tasks never ended, {stuck} among them")
        self.outcome.seconds = float(self._last_submit - self._first_submit)
        self.outcome.drained_seconds = float(self._now - self._last_submit)
        return self.outcome

    def _at(self, moment: float, action: Callable[[], None]) -> None:
        heappush(self._timers, (moment, next(self._number), action))

    def _submission_of(self, job: Job) -> Callable[[], None]:
        def submit() -> None:
            self._apply([submitted(job.task)])
            self._wake_for(job.task)

        return submit

    def _wake_for(self, task: Task) -> None:
        """Wake up when the task has to be planned again because of the time alone."""
        for moment in (task.not_before, task.waits_until, task.stop_deadline_at):
            if moment is not None and moment > self._now and not task.is_terminal:
                self._at(moment, lambda: None)

    def _turn(self) -> None:
        """Run one cycle of the leader."""
        reports, self._reports = self._reports, []
        self._commit(
            learn(self.world, apply_reports(self.world, reports, self._now, self._policy), self._now)
        )
        self._commit(due(self.world, self._now, self._policy, self._watch))
        self._watch = extend_window(self._watch, self._now)
        while decisions := settle_dependencies(self.world.awaited, self.world.tasks, self._now):
            self._commit(decisions)
        cursor = None
        while True:
            plan = plan_cycle(
                self.world, self._policy, self._now, cursor, cache=self._cache, forecasts=self._forecasts
            )
            self._commit(plan.decisions)
            cursor = plan.cursor
            if cursor is None:
                break
        move = self._consolidation.next_move(self.world, self._policy, self._now, self._forecasts)
        if move is not None:
            self._commit([move])
            self._consolidation.count(move, self._now)
        *_, self._forecasts = make_forecasts(self.world, self._policy, self._now, self._forecasts)

    def _commit(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            self._apply(events_of(decision))
            for write in decision.tasks:
                task = write.task
                if task.state is TaskState.ADMITTED and task.fence == 1:
                    wait = self._now - task.submitted_at
                    self.outcome.waits[band_of(task.priority)[0]].append(wait)
                    if task.demand.gpus == WIDE_GPUS and band_of(task.priority)[0] == "batch":
                        self.outcome.waits["batch, 8 GPUs"].append(wait)
                self.outcome.preemptions += "preemptions" in write.changed
                self.outcome.ended += task.is_terminal
                self.outcome.expired += task.state is TaskState.EXPIRED
                self._wake_for(task)
            for order in decision.orders:
                self._execute(order)

    def _apply(self, events: Iterable[NewEvent]) -> None:
        for event in events:
            self.world.apply([event.at(Position(self.world.position + 1), self._now)])

    def _execute(self, order: AnyOrder) -> None:
        match order:
            case StartOrder():
                run = self._runs.get(order.task)
                if run is None or run.fence != order.fence:
                    run = self._runs[order.task] = Run(self._jobs[order.task], order.fence)
                run.ranks.add(order.rank)
                self._at(self._now + START_SECONDS, lambda: self._start(run, order))
            case GoOrder() if order.rank == 0:
                self._begin(self._runs[order.task])
            case StopOrder():
                self._stop(self._runs[order.task], order.rank)
            case _:
                pass

    def _start(self, run: Run, order: StartOrder) -> None:
        """Note that the process of a rank has started. Ranks of a gang wait for each other."""
        if order.rank in run.ranks:
            self._reports.append(Started(order.task, run.fence, self._now, 1, order.rank))
            if order.barrier:
                self._reports.append(Ready(order.task, run.fence, self._now, "10.0.0.1:1", order.rank))
            else:
                self._begin(run)

    def _begin(self, run: Run) -> None:
        if run.began is None:
            run.began = float(self._now)
            self._at(run.began + self._left[run.job.task.id], lambda: self._finish(run))

    def _finish(self, run: Run) -> None:
        for rank in sorted(run.ranks):
            self._end(run, rank, Ending.SUCCEEDED)

    def _stop(self, run: Run, rank: int) -> None:
        """Give the run notice to stop; the ranks of a gang get it together."""
        takes = CHECKPOINT_SECONDS if run.job.checkpoints else 0.0
        self._at(self._now + takes, lambda: self._end(run, rank, Ending.STOPPED))

    def _end(self, run: Run, rank: int, ending: Ending) -> None:
        """Note the end of a rank, unless it has ended already. When the last rank has stopped, lost work is
        counted."""
        if rank not in run.ranks:
            return
        run.ranks.remove(rank)
        task = run.job.task
        self._reports.append(Ended(task.id, run.fence, self._now, ending, rank=rank))
        self._reports.append(Gone(task.id, run.fence, self._now, Proof.PROCESS_ABSENT, rank=rank))
        if ending is Ending.STOPPED and not run.ranks and run.began is not None:
            done = self._now - run.began
            if run.job.checkpoints:
                self._left[task.id] = max(0.001, self._left[task.id] - done)
            else:
                self.outcome.lost_gpu_seconds += done * _gpus(task.demand)

    def _advance_to(self, moment: float) -> None:
        """Add memory × time since the last call to the sums. Means count only until the last submit."""
        elapsed = moment - self._measured_at
        for tenant in self.world.accounts:
            self.outcome.tenants[tenant] += elapsed * self.world.accounts.held_mb(tenant)
        passed = min(moment, self._last_submit) - self._measured_at
        if passed > 0:
            self._sample_fragmentation()
            leased = sum(ledger.leased_mb() for ledger in self.world.ledgers.values())
            self.outcome.leased_mb_seconds += passed * leased
            self.outcome.free_mb_seconds += passed * self._free.free_mb
            self.outcome.stranded_mb_seconds += passed * self._free.stranded_mb
        self._measured_at = float(moment)

    def _sample_fragmentation(self) -> None:
        if self._now - self._sampled_at >= SAMPLE_SECONDS:
            self._sampled_at = float(self._now)
            self._free = fragmentation(self.world, self._policy, self._now).total


def _gpus(demand: Demand) -> int:
    return demand.gpus + sum(bundle.gpus for bundle in demand.bundles)
