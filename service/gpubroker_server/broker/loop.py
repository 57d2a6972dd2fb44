"""The leader's loop. Each step of a cycle reads the World and makes decisions, commits them, and then sends
their orders."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass
from math import inf

import structlog

from gpubroker_server.broker.arrays import Arrays, ends_of
from gpubroker_server.broker.commit import COMMITTED, TRIES, Committer, PictureDiverged, rejected
from gpubroker_server.broker.dispatch import Dispatcher
from gpubroker_server.broker.fleet import FleetKeeper
from gpubroker_server.broker.inbox import Inbox
from gpubroker_server.broker.observe import Observer, without_values
from gpubroker_server.broker.planner import Planner
from gpubroker_server.broker.run_logs import LogKeeper
from gpubroker_server.broker.task_objects import TaskObjects
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.leader_term import LeaderTerm, RefusedTerm, refused_term
from gpubroker_server.core.domain.orders import Logged, Report, TermRefused
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Move
from gpubroker_server.core.domain.units import Instant, NodeName, TaskId
from gpubroker_server.core.lifecycle.reconcile import take_over
from gpubroker_server.core.lifecycle.silent_nodes import PausedDetection
from gpubroker_server.core.world.dependencies import settle_dependencies
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.executor import Executor
from gpubroker_server.ports.store import (
    Clock,
    CommitVerdict,
    LostCommits,
    ReadTicks,
    StaleTerm,
    StoreUnavailable,
    TaskStore,
)
from gpubroker_server.ports.task_objects import ObjectQuestion

log = structlog.get_logger("gpubroker.broker")

TICK_SECONDS = 0.25
"""The longest time between two cycles. Deadlines and due retries need a cycle even if nothing happens."""

PACE_SECONDS = 0.005
"""The shortest time between the beginnings of two cycles, so that tasks and reports that arrive together
share one plan and two commits. After a quiet time, a cycle begins at once."""

STORE_RETRY_SECONDS = 1.0
"""The pause after the database could not be reached."""

MOST_ENDS_ASKED = 1000
"""The most tasks whose ends one cycle reads from the database."""

NewFleet = Callable[[Callable[[], float]], FleetKeeper]
"""Makes a FleetKeeper. The argument is a function that returns how many seconds commits take now."""

_MOVES = {f"task.{move}": move for move in Move if move not in {Move.SUBMITTED, Move.CHANGED}}
"""Maps the kind of an event to the move that the leader logs. The gateway logs the other moves when it
accepts the task or its change."""


@dataclass(eq=False, kw_only=True)
class Leader:
    """Leads for one term, from `run` until it is cancelled or the term is over."""

    leader_term: LeaderTerm
    ticks: ReadTicks
    world: World
    policy: InitVar[Policy]
    store: TaskStore
    executor: Executor
    observer: Observer
    dispatcher: Dispatcher
    clock: Clock
    new_fleet: InitVar[NewFleet | None] = None
    logs: LogKeeper | None = None
    objects: TaskObjects | None = None

    def __post_init__(self, policy: Policy, new_fleet: NewFleet | None) -> None:
        self._inbox = Inbox()
        self._arrays = Arrays(self.store, self.world)
        self._timer = CycleTimer()
        self._between_cycles = asyncio.Event()
        wake, hear = self._timer.wake, self._inbox.put
        self.dispatcher.hear = self.hear
        self._commits = Committer(
            self.leader_term,
            self.ticks,
            self.world,
            self.store,
            self.dispatcher,
            wake,
            hear,
            self._on_committed,
        )
        self.fleet = None if new_fleet is None else new_fleet(self._commits.seconds)
        self.planner = Planner(self.world, policy, self.clock, self._commits, self._timer.wake)
        self._is_winding_up = False
        self._wound_up = asyncio.Event()

    async def cycle(self) -> None:
        """Run one cycle: observe, plan, commit, act. Raises StaleTerm and PictureDiverged, and
        StoreUnavailable if the next cycle has to continue with the rest."""
        is_last = self._is_winding_up
        self._commits.check_leader_term()
        await self._commits.dispatch()  # orders that the last cycle could not send
        await self._settle_reports()
        if is_last:
            self._wound_up.set()
            return
        self._commits.begin_cycle()
        await self._settle_requests()
        await self._settle_deadlines()
        await self._settle_dependencies()
        if self._is_winding_up:
            return
        if self.fleet is not None:
            decisions = self.fleet.take()
            await self._commits.carry_out(decisions)
            self.fleet.told(decisions)
        await self.planner.plan(lambda: self._is_winding_up)
        self._commits.end_cycle()

    async def run(self) -> None:
        """Run the loops of the leader until cancelled. Raises an exception group that contains StaleTerm or
        PictureDiverged."""
        while True:
            try:
                await self.take_over()
                break
            except StoreUnavailable as fault:
                await self._wait_for_store(fault)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen())
            group.create_task(self.dispatcher.serve_models(self.leader_term, self.hear))
            group.create_task(self._lead())
            if self.logs is not None:
                group.create_task(self.logs.follow())
            if self.fleet is not None:
                group.create_task(self.fleet.keep(self._between_cycles))
            if self.objects is not None:
                group.create_task(self.objects.serve())
                group.create_task(self.objects.keep())

    async def take_over(self) -> None:
        """Begin the term. No node is used before its agent has answered this leader."""
        decision = take_over(self.world)
        await self._commits.carry_out([decision] if decision else [])
        log.info("leading", term=self.leader_term.term)

    async def wind_up(self) -> None:
        """Stop planning, and return once all reports so far are committed and all committed orders are sent.
        Agents send later reports again to the next leader."""
        self._is_winding_up = True
        self._timer.wake(urgent=True)
        await self._wound_up.wait()

    def on_events(self, events: Sequence[Event]) -> None:
        """Note the events, and begin a cycle soon if a gateway inserted a task or a request. The leader's own
        commits need no new cycle."""
        self.observer.on_events(events)
        if self.fleet is not None:
            self.fleet.on_events(events)
        log_moves(events, self.world)
        if any(event.kind in {"task.submitted", "request.made"} for event in events):
            self._timer.wake(urgent=True)

    def hear(self, reports: Sequence[Report]) -> None:
        """Keep reports, in order, for the next cycle."""
        self.observer.hear(reports)
        if self.fleet is not None:
            self.fleet.hear(reports)
        self._inbox.put(reports)
        self._timer.wake()

    @property
    def paused(self) -> PausedDetection | None:
        """The silent nodes that are not given up, and the reason; None if there are none."""
        return self.observer.heartbeats.paused

    def silent(self) -> dict[NodeName, Instant]:
        """Return the nodes whose heartbeat is late, each with the time since when it is late."""
        return self.observer.heartbeats.late(self.world, self.ticks(), self.clock.now())

    async def _listen(self) -> None:
        await self.executor.start(self.leader_term, self.world.lineage)
        while True:
            await self._inbox.has_room.wait()
            heard = await self.executor.reports()
            self.hear([report for report in heard if not isinstance(report, TermRefused | ObjectQuestion)])
            if self.objects is not None:
                self.objects.hear([report for report in heard if isinstance(report, ObjectQuestion)])
            for report in heard:
                if isinstance(report, TermRefused):
                    await self._on_refused(report)

    async def _on_refused(self, by: TermRefused) -> None:
        """Read which process leads, after an agent has refused the term of this one. Raises StaleTerm if
        another process leads, and LostCommits if the database has lost a term that the agent knows."""
        term = self.leader_term.term
        try:
            row = await self.store.leader()
        except StoreUnavailable:
            return  # the agent is asked again
        match refused_term(row, term, (by.lineage, by.term)):
            case RefusedTerm.OVER:
                raise StaleTerm(f"term {term} is over: {row.holder} leads term {row.term}; stop leading")
            case RefusedTerm.LOST:
                raise LostCommits(
                    f"node {by.node} knows term {by.term}, which this database gave and has lost: it was "
                    f"restored from a backup, or a standby took over that lacked it; leading a new lineage"
                )
            case RefusedTerm.ELSEWHERE:
                log.error(
                    "a node takes no orders: it follows a later lineage than this database has; if this is "
                    "the database to go on with, run `gpubroker new-lineage`, otherwise stop this process",
                    node=by.node,
                    known_lineage=by.lineage,
                    lineage=row.lineage,
                )

    async def _lead(self) -> None:
        while True:
            self._between_cycles.set()
            await self._timer.next()
            self._between_cycles.clear()
            try:
                await self.cycle()
            except StoreUnavailable as fault:
                self._between_cycles.set()
                await self._wait_for_store(fault)

    async def _wait_for_store(self, fault: StoreUnavailable) -> None:
        log.debug("the database cannot be reached; trying again", fault=str(fault))
        await asyncio.sleep(STORE_RETRY_SECONDS)
        self._timer.wake()

    def _on_committed(self, decisions: Sequence[Decision]) -> None:
        if self.fleet is not None:
            self.fleet.on_committed(decisions)

    async def _settle_reports(self) -> None:
        """Commit the decisions that the reports in the inbox lead to. A report stays in the inbox until
        these are committed. Raises PictureDiverged if the database refuses them TRIES times in a row."""
        left, tries = len(self._inbox), TRIES
        while left > 0:
            batch = self._inbox.next_batch()
            now = self.clock.now()
            if self.logs is not None:  # logs are stored before the ends of their runs
                await self.logs.keep([report for report in batch if isinstance(report, Logged)])
            decisions = await self.observer.on_reports(batch, now, self._arrays)
            self._arrays.begin_commit()
            verdicts = await self._commits.carry_out(decisions)
            if set(verdicts) <= {COMMITTED}:
                self._arrays.committed()
            if CommitVerdict.STALE in verdicts:
                log.info("reports met a changed row; deciding again", reports=len(batch))
                tries -= 1
                if tries == 0:
                    raise PictureDiverged.of("its reports")
                continue
            rejected_reports = self._without_values(batch, rejected(decisions, verdicts), now)
            self._inbox.replace(len(batch), rejected_reports)
            left, tries = left - len(batch) + len(rejected_reports), TRIES
        self._inbox.weigh()

    def _without_values(
        self, batch: Sequence[Report], refused: Iterable[Decision], now: Instant
    ) -> list[Report]:
        """Return the reports that replace those with values that the database cannot store. Their runs fail,
        and the leader continues."""
        to_settle: list[Report] = []
        for decision in refused:
            plain = without_values(batch, decision.subject, now)
            if not plain:
                log.error("reports dropped: the database refuses them", subject=decision.subject)
            to_settle += plain
        return to_settle

    async def _settle_requests(self) -> None:
        """Carry out the requests of clients. If the database refuses a change, its request is marked as done
        without the change."""
        decisions = self.observer.on_requests(self.clock.now())
        verdicts = await self._commits.carry_out(decisions)
        await self._commits.carry_out(
            [Decision(d.subject, d.why, requests_done=d.requests_done) for d in rejected(decisions, verdicts)]
        )

    async def _settle_deadlines(self) -> None:
        """Commit the decisions that are due now. Nodes that were given up, or that may have missed an order,
        are asked for their runs. Nodes on which a run has ended since the last sample are asked to measure
        their devices."""
        listening = self._inbox.has_room.is_set() and self.executor.is_connected
        await self._commits.carry_out(self.observer.on_time(self.clock.now(), listening=listening))
        nodes, self.observer.to_ask = self.observer.to_ask, []
        if nodes:
            self.executor.ask(nodes)
        self.executor.measure(self.observer.to_measure())

    async def _settle_dependencies(self) -> None:
        """Read how awaited tasks ended that are not in the World, then admit or fail the tasks that run after
        them."""
        awaited = self.world.awaited
        if awaited.unknown:
            asked = sorted(awaited.unknown)[:MOST_ENDS_ASKED]
            states = await self.store.states(asked)
            awaited.learn(asked, await ends_of(self.store, states))
        while decisions := settle_dependencies(self.world.awaited, self.world.tasks, self.clock.now()):
            if set(await self._commits.carry_out(decisions)) != {COMMITTED}:
                return


def log_moves(events: Iterable[Event], world: World) -> None:
    """Log one line for each move of a task. The World has already applied these events, and may have dropped
    a task that ended."""
    for event in events:
        move = _MOVES.get(event.kind)
        if move is None:
            continue
        row = event.task or world.tasks.get(TaskId(event.key))
        about: dict[str, str | int | None] = {"task": event.key, "tenant": event.tenant}
        if row is not None:
            about |= {"attempt": row.fence, "node": row.node, "why": row.stop_reason, "cause": row.stop_cause}
        log.info(f"task {move}", **{name: value for name, value in about.items() if value is not None})


class CycleTimer:
    """Decides when cycles begin. New tasks and requests that arrive within PACE_SECONDS share a cycle; they
    do not wait for a cycle that reports have caused."""

    def __init__(self) -> None:
        self._woken = asyncio.Event()
        self._is_urgent = asyncio.Event()
        self._began_at = -inf
        self._urgent_at = -inf
        """The time when the last urgent cycle began."""

    def wake(self, *, urgent: bool = False) -> None:
        """Begin a cycle soon. `urgent` is True if a client waits for the next plan."""
        self._woken.set()
        if urgent:
            self._is_urgent.set()

    async def next(self) -> None:
        """Wait until the next cycle should begin. A `wake` after that counts for the following cycle."""
        loop = asyncio.get_running_loop()
        if not self._woken.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._woken.wait()
        if not self._is_urgent.is_set() and loop.time() < self._began_at + PACE_SECONDS:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._began_at + PACE_SECONDS):
                    await self._is_urgent.wait()
        await asyncio.sleep(max(0.0, self._urgent_at + PACE_SECONDS - loop.time()))
        self._began_at = loop.time()
        if self._is_urgent.is_set():
            self._urgent_at = self._began_at
        self._woken.clear()
        self._is_urgent.clear()
