"""One replay: the core decides, runs last as long as they last, and the clock jumps from event to event."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from statistics import mean

from bench.measuring import percentile
from bench.simulate.work import Scene, Work
from service.core.cycle import plan_cycle
from service.core.deadlines import Watch, due, keep_watch
from service.core.device import DeviceSample
from service.core.events import NewEvent, events_of, submitted
from service.core.orders import Ended, Ending, Gone, Order, Report, Started, StartOrder, StopOrder
from service.core.plan import Decision
from service.core.policy import BANDS, Policy, band_of
from service.core.runs import react
from service.core.task import TaskState
from service.core.units import Fence, Instant, Mib, Position, Seconds, TaskId
from service.core.world import World

START_SECONDS = 0.1
SAVE_SECONDS = 1.0
"""What a run that checkpoints needs to save and leave when it is told to."""
FOR_EVER = Seconds(1e12)


@dataclass
class Seen:
    """What came of it. GPU-seconds count each GPU that a run was on."""

    capacity_mb: int
    seconds: float = 0.0
    """From the first submit to the last: what the means over time are taken over."""
    leased_mb_seconds: float = 0.0
    stranded_mb_seconds: float = 0.0
    """Free, but on devices where no half of the demands would fit."""
    waits: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Band -> seconds from submit to first admission."""
    preemptions: int = 0
    lost_gpu_seconds: float = 0.0
    ended: int = 0
    drained_seconds: float = 0.0
    """From the last submit to the end of the last run."""

    def figures(self) -> dict[str, tuple[float, str]]:
        """Metric -> (value, unit)."""
        whole = self.capacity_mb * self.seconds or 1.0
        told = {
            "utilisation": (100 * self.leased_mb_seconds / whole, "%"),
            "fragmented": (100 * self.stranded_mb_seconds / whole, "%"),
            "preemptions": (float(self.preemptions), ""),
            "lost_gpu_h": (self.lost_gpu_seconds / 3600.0, "h"),
            "drained": (self.drained_seconds / 3600.0, "h"),
        }
        for name, _, _ in BANDS:
            waits = self.waits.get(name)
            if waits:
                told[f"wait.{name}.mean"] = (mean(waits), "s")
                told[f"wait.{name}.p90"] = (percentile(waits, 90), "s")
        return told


@dataclass
class Run:
    work: Work
    fence: Fence
    began: float
    is_over: bool = False


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
        sizes = sorted(work.task.demand.gpu_mb or 0 for work in scene.works if work.task.demand.gpus)
        self._typical_mb = sizes[len(sizes) // 2] if sizes else 0
        self._first_submit = self._now
        self._measured_at = float(self._now)
        self.world = World()
        self.seen = Seen(sum(device.allocatable_mb for device in scene.devices))
        for node in scene.nodes:
            self.world.add_node(replace(node, ready=True))
        for device in scene.devices:
            self.world.add_device(device)
        self.world.measure(DeviceSample(device.key, self._now, Mib(0)) for device in scene.devices)
        for work in scene.works:
            self._at(work.task.submitted_at, self._submission_of(work))

    def run(self) -> Seen:
        while self._moments:
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
        return lambda: self._append([submitted(work.task)])

    def _turn(self) -> None:
        """What a leader does in one cycle."""
        reports, self._reports = self._reports, []
        self._carry_out(react(self.world, reports, self._now, self._policy))
        self._carry_out(due(self.world, self._now, self._policy, self._watch))
        self._watch = keep_watch(self._watch, self._now)
        cursor = None
        while True:
            plan = plan_cycle(self.world, self._policy, self._now, cursor)
            self._carry_out(plan.decisions)
            cursor = plan.cursor
            if cursor is None:
                return

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            self._append(events_of(decision))
            for write in decision.tasks:
                task = write.task
                if task.state is TaskState.ADMITTED and task.fence == 1:
                    wait = self._now - task.submitted_at
                    self.seen.waits[band_of(task.priority)[0]].append(wait)
                self.seen.preemptions += "preemptions" in write.changed
                self.seen.ended += task.is_terminal
                if task.not_before is not None and task.state is TaskState.PENDING:
                    self._at(task.not_before, lambda: None)
            for order in decision.orders:
                self._obey(order)

    def _append(self, events: Iterable[NewEvent]) -> None:
        for event in events:
            self.world.apply([event.at(Position(self.world.position + 1), self._now)])

    def _obey(self, order: Order) -> None:
        match order:
            case StartOrder():
                run = Run(self._works[order.task], order.fence, self._now + START_SECONDS)
                self._runs[order.task] = run
                self._at(run.began, lambda: self._tell(run, Started(order.task, order.fence, self._now, 1)))
                end = run.began + self._left[order.task]
                self._at(end, lambda: self._end(run, Ending.SUCCEEDED))
            case StopOrder():
                stopped = self._runs[order.task]
                takes = SAVE_SECONDS if stopped.work.checkpoints else 0.0
                self._at(self._now + takes, lambda: self._end(stopped, Ending.STOPPED))
            case _:
                pass

    def _tell(self, run: Run, *reports: Report) -> None:
        if not run.is_over:
            self._reports += reports

    def _end(self, run: Run, ending: Ending) -> None:
        """The first end counts: one that came to its own end had nothing left to stop."""
        task = run.work.task
        done = max(0.0, self._now - run.began)
        self._tell(
            run,
            Ended(task.id, run.fence, self._now, ending),
            Gone(task.id, run.fence, self._now, "process_absent"),
        )
        if ending is Ending.STOPPED and not run.is_over:
            if run.work.checkpoints:
                self._left[task.id] = max(0.001, self._left[task.id] - done)
            else:
                self.seen.lost_gpu_seconds += done * task.demand.gpus
        run.is_over = True

    def _count_until(self, moment: float) -> None:
        """Add up what was leased and stranded since the last look, as far as tasks were still coming."""
        passed = min(moment, self._last_submit) - self._measured_at
        if passed > 0:
            books = self.world.books.values()
            self.seen.leased_mb_seconds += passed * sum(book.leased_mb() for book in books)
            free = (max(0, book.free_mb()) for book in books)
            self.seen.stranded_mb_seconds += passed * sum(mb for mb in free if mb < self._typical_mb)
            self._measured_at = float(moment)
