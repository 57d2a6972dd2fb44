"""A machine with GPUs, its agent and the processes of its runs: the truth that is reported to the broker."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random

from gpubroker_server.core.domain.device import DeviceSample, Node
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import (
    Checkpointed,
    Ended,
    Ending,
    Failure,
    ForgetOrder,
    Gone,
    NodeReport,
    Order,
    Report,
    ReportedDevice,
    Sampled,
    Started,
    StartOrder,
    StopOrder,
)
from gpubroker_server.core.domain.units import DeviceKey, Fence, Mib, NodeName, TaskId, Term, device_key
from msgspec import Struct

from tests.simulation.timeline import Line, Timeline

Claim = tuple[TaskId, Fence]
CLUSTER = "simulated"


class Program(Struct, frozen=True):
    """What the code of one task does. Only its machine knows."""

    work_seconds: float
    bad_end: Ending = Ending.FAILED
    bad_attempts: int = 0
    """So many attempts come to the bad end half-way, the next one succeeds."""
    saves_every_seconds: float | None = None
    heeds_notice: bool = True
    leaves_after_seconds: float = 0.1
    """From its end or its kill until the process is gone."""


@dataclass
class Run:
    order: StartOrder
    program: Program
    done_seconds: float
    """Work that the checkpoint it resumed from had saved."""
    fails: bool
    is_alive: bool = True
    has_ended: bool = False
    is_leaving: bool = False
    is_forgotten: bool = False
    began_at: float | None = None
    saved: int = 0
    said: list[Report] = field(default_factory=list)
    """What the agent says again to a new leader."""

    @property
    def claim(self) -> Claim:
        return self.order.task, self.order.fence


class Announcement(Struct, frozen=True):
    """A leader's first words: from now on, no order of an older term."""


Message = tuple[Term, Order | Announcement, float]
"""(term, what, seconds of work that the checkpoint attached to a start had saved)"""


class Machine:
    def __init__(
        self,
        name: str,
        devices: tuple[ReportedDevice, ...],
        programs: Mapping[TaskId, Program],
        timeline: Timeline,
        chance: Random,
        hear: Callable[[tuple[Term, Report]], None],
    ) -> None:
        self.name = NodeName(name)
        self.devices = devices
        self.is_on = True
        self.has_agent = True
        self.processes: list[Run] = []
        self.succeeded: set[Claim] = set()
        self.orders = Line(timeline, chance, self.receive)
        self.reports = Line(timeline, chance, hear)
        self._programs = programs
        self._timeline = timeline
        self._chance = chance
        self._term = Term(0)
        self._boots = self._agents = 1
        self._announcements = 0
        self._runs: dict[Claim, Run] = {}
        self._seen: set[Claim] = set()

    @property
    def incarnation(self) -> str:
        """Each announcement opens one: a start that was ordered before it and comes later does not begin."""
        return f"{self.name}-{self._agents}.{self._announcements}"

    @property
    def can_be_measured(self) -> bool:
        return self.has_agent and not self.reports.is_cut

    def used_mb(self) -> dict[DeviceKey, int]:
        used = {device_key(CLUSTER, self.name, device.uuid): 0 for device in self.devices}
        for run in self.processes:
            for device, mb in run.order.devices:
                used[device] += mb
        return used

    def samples(self) -> list[DeviceSample]:
        """What the agent measures now: most runs use a little less than they asked for."""
        by_holder: dict[DeviceKey, dict[str, Mib]] = {device: {} for device in self.used_mb()}
        for run in self.processes:
            for device, mb in run.order.devices:
                by_holder[device][f"{run.order.task}:{run.order.fence}"] = Mib(mb * 15 // 16)
        now = self._timeline.now()
        return [
            DeviceSample(
                device, now, Mib(sum(holders.values())), by_holder=holders, utilization=float(bool(holders))
            )
            for device, holders in by_holder.items()
        ]

    def lose_power(self) -> None:
        for run in list(self.processes):
            self._vanish(run)
        self.is_on = False
        self._boots += 1
        self.lose_agent()

    def lose_agent(self) -> None:
        self.has_agent = False
        self._runs.clear()
        self.orders.lose_everything()
        self.reports.lose_everything()

    def kill_processes(self) -> None:
        for run in list(self.processes):
            self._vanish(run)

    def start_agent(self) -> None:
        """A new agent adopts every process that bears our mark."""
        self.is_on = self.has_agent = True
        self._agents += 1
        self._runs = {run.claim: run for run in self.processes}
        self._seen = set(self._runs)
        for run in self.processes:
            run.is_forgotten = run.has_ended
            run.said.clear()

    def receive(self, message: Message) -> None:
        term, what, done_seconds = message
        if term < self._term:
            if isinstance(what, StartOrder):
                self._refuse((what.task, what.fence))
            return
        self._term = term
        match what:
            case Announcement():
                self._answer()
            case StartOrder():
                self._start(what, done_seconds)
            case StopOrder():
                self._stop(what)
            case ForgetOrder():
                self._forget(what)

    def beat(self) -> None:
        """A sign of life, with what it measures."""
        if self.has_agent and self._term:
            sampled = Sampled(self.name, self._timeline.now(), tuple(self.samples()))
            self.reports.send((self._term, sampled))

    def _answer(self) -> None:
        self._announcements += 1
        node = Node(self.name, 32.0, Mib(128 * 1024), 24, self.incarnation, f"{self.name}-boot-{self._boots}")
        known = sorted(self._runs)
        runs = tuple((task, fence, 0) for task, fence in known)
        self.reports.send((self._term, NodeReport(node, self.devices, runs, self._timeline.now())))
        for claim in known:
            for report in self._runs[claim].said:
                self.reports.send((self._term, report))

    def _start(self, order: StartOrder, done_seconds: float) -> None:
        claim = (order.task, order.fence)
        if order.incarnation != self.incarnation:
            self._refuse(claim)
        elif claim not in self._seen:
            self._seen.add(claim)
            program = self._programs[order.task]
            run = Run(order, program, done_seconds, fails=order.fence <= program.bad_attempts)
            self._runs[claim] = run
            self.processes.append(run)
            self._timeline.after(self._chance.uniform(0.05, 3.0), lambda: self._begin(run))

    def _refuse(self, claim: Claim) -> None:
        if claim in self._seen:
            return
        self._seen.add(claim)
        now = self._timeline.now()
        self.reports.send((self._term, Ended(*claim, now, Ending.NEVER_STARTED)))
        self.reports.send((self._term, Gone(*claim, now, Proof.NEVER_STARTED)))

    def _stop(self, order: StopOrder) -> None:
        claim = (order.task, order.fence)
        run = self._runs.get(claim)
        if run is None and claim in self._seen:
            gone = Gone(*claim, self._timeline.now(), Proof.PROCESS_ABSENT, samples=tuple(self.samples()))
            self.reports.send((self._term, gone))
        elif run is None:
            self._refuse(claim)
        elif run.program.heeds_notice and order.grace_seconds > 0:
            self._timeline.after(order.grace_seconds * self._chance.random(), lambda: self._give_way(run))
        else:
            self._timeline.after(order.grace_seconds, lambda: self._kill(run))

    def _forget(self, order: ForgetOrder) -> None:
        run = self._runs.get((order.task, order.fence))
        if run is not None:
            run.is_forgotten = True
            self._drop_if_done(run)

    def _begin(self, run: Run) -> None:
        if not run.is_alive or run.is_leaving:
            return
        run.began_at = self._timeline.now()
        self._say(run, Started(*run.claim, self._timeline.now(), pid=1))
        left = max(0.0, run.program.work_seconds - run.done_seconds)
        self._timeline.after(left / 2 if run.fails else left, lambda: self._finish(run))
        if run.program.saves_every_seconds is not None:
            self._timeline.after(run.program.saves_every_seconds, lambda: self._save(run, again=True))

    def _finish(self, run: Run) -> None:
        if not run.is_alive or run.is_leaving:
            return
        if run.fails and run.program.bad_end is Ending.LOST:
            self._leave(run, Ending.LOST)
        elif run.fails:
            self._leave(run, Ending.FAILED, failure=Failure("exception", "as written"))
        else:
            self._leave(run, Ending.SUCCEEDED, result=b"%d" % run.order.fence)
            self.succeeded.add(run.claim)

    def _give_way(self, run: Run) -> None:
        self._save(run, again=False)
        self._leave(run, Ending.STOPPED)

    def _kill(self, run: Run) -> None:
        self._leave(run, Ending.LOST)

    def _save(self, run: Run, *, again: bool) -> None:
        if not run.is_alive or run.is_leaving or run.began_at is None or not run.program.saves_every_seconds:
            return
        now = self._timeline.now()
        run.saved += 1
        done = run.done_seconds + now - run.began_at
        data = str(done).encode()
        checkpoint = Checkpointed(*run.claim, now, run.saved, sha256(data).hexdigest(), data, None)
        self._say(run, checkpoint, again=False)
        if again:
            self._timeline.after(run.program.saves_every_seconds, lambda: self._save(run, again=True))

    def _leave(
        self, run: Run, ending: Ending, *, result: bytes | None = None, failure: Failure | None = None
    ) -> None:
        if not run.is_alive or run.is_leaving:
            return
        run.is_leaving = run.has_ended = True
        self._say(run, Ended(*run.claim, self._timeline.now(), ending, result=result, failure=failure))
        self._timeline.after(run.program.leaves_after_seconds, lambda: self._vanish(run))

    def _vanish(self, run: Run) -> None:
        if not run.is_alive:
            return
        run.is_alive = False
        self.processes.remove(run)
        proof = Proof.PROCESS_ABSENT if run.order.devices else Proof.SHARED_PROCESS
        self._say(run, Gone(*run.claim, self._timeline.now(), proof, samples=tuple(self.samples())))
        self._drop_if_done(run)

    def _say(self, run: Run, report: Report, *, again: bool = True) -> None:
        if not self.has_agent or self._runs.get(run.claim) is not run:
            return
        if again:
            run.said.append(report)
        self.reports.send((self._term, report))

    def _drop_if_done(self, run: Run) -> None:
        if run.is_forgotten and not run.is_alive and self._runs.get(run.claim) is run:
            del self._runs[run.claim]
