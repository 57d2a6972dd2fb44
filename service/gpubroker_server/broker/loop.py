"""The loop of the leader: hear, decide, commit, act. One cycle at a time, nothing acts before its commit."""

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import inf

import structlog

from gpubroker_server.broker.cycle_timing import Rhythm
from gpubroker_server.broker.dispatch import Dispatcher
from gpubroker_server.broker.fragmentation_watch import FragmentationWatch
from gpubroker_server.broker.observe import Observer, next_batch, plainer
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.leader_term import Tenure
from gpubroker_server.core.domain.orders import Checkpointed, Ended, Report
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Instant, NodeName
from gpubroker_server.core.lifecycle.reconcile import take_over
from gpubroker_server.core.lifecycle.silent_nodes import PausedDetection
from gpubroker_server.core.planning.consolidation import Consolidation
from gpubroker_server.core.planning.cycle import Slice
from gpubroker_server.core.planning.forecast_accuracy import Foresight
from gpubroker_server.core.planning.plan_cache import PlanCache
from gpubroker_server.core.world.dependencies import TaskEnd, settle_dependencies
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import (
    Clock,
    CommitVerdict,
    Executor,
    ReadTicks,
    StoreUnavailable,
    TaskStore,
    TenureOver,
)

log = structlog.get_logger("gpubroker.broker")

MOST_TURNS = 4
"""What is decided in so many turns of planning, of some milliseconds each, shares one commit. The first turn
of a cycle, which is that of the most urgent, has its own."""

FORESEE_SECONDS = 0.005
"""So long each cycle works on forecasts, while they are due."""

TRIES = 20
"""A leader is the only writer of states; if what it decides is refused so often, its picture is wrong."""

STORE_PATIENCE_SECONDS = 1.0
"""Pause before a commit is tried again when the database could not be reached."""

CONNECTED = "connected"
"""What an executor that hears its nodes calls its state."""
COMMITTED = CommitVerdict.COMMITTED
_NEVER = frozenset({CommitVerdict.REFUSED, CommitVerdict.UNSTORABLE})
_DIVERGED = (
    f"{TRIES} times in a row the database refused what the leader made of {{}}; "
    "restart the service, which reads the picture anew"
)

MOST_ASKED = 1000
"""Ends of tasks that are asked for in one cycle."""

MOST_HEARD = 10_000
MOST_HEARD_BYTES = 64 * 2**20
"""With more in hand than this, which only happens while it cannot be committed, no reports are fetched."""


class PictureDiverged(Exception):
    """The World in memory no longer matches the rows; nothing was written from it."""


class Leader:
    """Leads for one term, from `run` until it is cancelled or the term is over."""

    def __init__(
        self,
        *,
        tenure: Tenure,
        ticks: ReadTicks,
        world: World,
        policy: Policy,
        store: TaskStore,
        executor: Executor,
        observer: Observer,
        dispatcher: Dispatcher,
        clock: Clock,
    ) -> None:
        self.tenure = tenure
        self._ticks = ticks
        self._world = world
        self._policy = policy
        self._store = store
        self._executor = executor
        self._observer = observer
        self._dispatcher = dispatcher
        self._clock = clock
        self._heard: deque[Report] = deque()
        self._heard_bytes = 0
        self._fragmentation = FragmentationWatch(world, policy)
        self._cache = PlanCache()
        """What the planner found out about the World so far."""
        self._consolidation = Consolidation()
        self.foresight = Foresight()
        self._undispatched: list[Decision] = []
        """Committed, and their orders not yet on their way: what a start needs is in the database."""
        self._refused: set[str] = set()
        """Subjects that the database refused in this cycle, and did not accept in it either."""
        self._in_vain: Mapping[str, int] = {}
        """Subject -> cycles in a row in which it was refused."""
        self._rhythm = Rhythm()
        self._has_room = asyncio.Event()
        self._winding_up = False
        self._wound_up = asyncio.Event()
        """No more reports are fetched without it: they wait at the executor, which stops asking for them."""
        self._has_room.set()

    def on_events(self, events: Sequence[Event]) -> None:
        """Wake up for what gateways inserted; the leader's own commits need no second look."""
        self._observer.on_events(events)
        if any(event.kind in {"task.submitted", "request.made"} for event in events):
            self._rhythm.arrive()

    def hear(self, reports: Sequence[Report]) -> None:
        """Keep what agents said, in order, for the next cycle."""
        self._observer.hear(reports)
        self._heard.extend(reports)
        self._heard_bytes += sum(map(_size_bytes, reports))
        self._look_for_room()
        self._rhythm.wake()

    async def take_over(self) -> None:
        """Begin the term: no node is used before its agent has answered it."""
        decision = take_over(self._world)
        await self._carry_out([decision] if decision else [])
        log.info("leading", term=self.tenure.term)

    async def run(self) -> None:
        """Raises StaleTerm in a group, and PictureDiverged."""
        while True:
            try:
                await self.take_over()
                break
            except StoreUnavailable as fault:
                await self._wait_for_store(fault)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen())
            group.create_task(self._dispatcher.serve_models(self.tenure, self.hear))
            group.create_task(self._lead())

    async def wind_up(self) -> None:
        """Back when what was heard by now is committed, and the orders of all that is committed have left.
        Nothing is planned from now on; what is heard later is told again to whoever leads next."""
        self._winding_up = True
        self._rhythm.arrive()
        await self._wound_up.wait()

    async def _listen(self) -> None:
        await self._executor.start(self.tenure)
        while True:
            await self._has_room.wait()
            self.hear(await self._executor.reports())

    async def _lead(self) -> None:
        while True:
            await self._rhythm.next()
            try:
                await (self._last_cycle() if self._winding_up else self.cycle())
            except StoreUnavailable as fault:
                await self._wait_for_store(fault)

    async def _wait_for_store(self, fault: StoreUnavailable) -> None:
        log.warning("what is stored is not reached; trying again", fault=str(fault))
        await asyncio.sleep(STORE_PATIENCE_SECONDS)
        self._rhythm.wake()

    async def cycle(self) -> None:
        """One turn: reports, requests, deadlines, then the plan.

        Raises StaleTerm, PictureDiverged, and StoreUnavailable: then the next turn takes up what is left.
        """
        self._check_tenure()
        await self._dispatch()
        await self._settle_reports()
        self._refused.clear()
        await self._settle_requests()
        await self._carry_out(self._observer.on_time(self._clock.now(), listening=self._is_listening))
        self._ask()
        await self._settle_dependencies()
        if self._winding_up:
            return
        if self.foresight.is_blind(self._world):
            await self._foresee(inf)
        await self._plan()
        await self._consolidate()
        self._fragmentation.look(self._clock.now())
        await self._foresee()
        self._count_refusals()

    @property
    def _is_listening(self) -> bool:
        return self._has_room.is_set() and self._executor.status().get("state") == CONNECTED

    def _ask(self) -> None:
        """Whoever is there, after all or again, says what it has, and what of it is gone."""
        nodes, self._observer.to_ask = self._observer.to_ask, []
        if nodes:
            self._executor.ask(nodes)

    @property
    def paused(self) -> PausedDetection | None:
        """What it does not give up, and why; None if it holds nothing back."""
        return self._observer.silence.paused

    def silent(self) -> dict[NodeName, Instant]:
        """Nodes that are late to say something, and since when."""
        return self._observer.silence.late(self._world, self._ticks(), self._clock.now())

    async def _last_cycle(self) -> None:
        await self._dispatch()
        await self._settle_reports()
        self._wound_up.set()

    async def _settle_reports(self) -> None:
        """A report stays in hand until what it means is committed. Raises PictureDiverged."""
        left, tries = len(self._heard), TRIES
        while left > 0:
            batch = next_batch(self._heard)
            now = self._clock.now()
            decisions = await self._observer.on_reports(batch, now)
            verdicts = await self._carry_out(decisions)
            if CommitVerdict.STALE not in verdicts:
                for _ in batch:
                    self._heard.popleft()
                again = self._said_plainly(batch, _never(decisions, verdicts), now)
                self._heard.extendleft(reversed(again))
                left, tries = left - len(batch) + len(again), TRIES
                continue
            log.info("reports met a changed row; looking again", reports=len(batch))
            tries -= 1
            if tries == 0:
                raise PictureDiverged(_DIVERGED.format("its reports"))
        self._heard_bytes = sum(map(_size_bytes, self._heard))
        self._look_for_room()

    def _look_for_room(self) -> None:
        if len(self._heard) <= MOST_HEARD and self._heard_bytes <= MOST_HEARD_BYTES:
            self._has_room.set()
        else:
            self._has_room.clear()

    def _said_plainly(
        self, batch: Sequence[Report], refused: Iterable[Decision], now: Instant
    ) -> list[Report]:
        """What a run says must not stop the leader: the run fails of it, and the others go on."""
        again: list[Report] = []
        for decision in refused:
            plain = plainer(batch, decision.subject, now)
            if not plain:
                log.error("reports dropped: the database refuses them", subject=decision.subject)
            again += plain
        return again

    async def _settle_requests(self) -> None:
        """A request whose change the database can never keep is settled without it."""
        decisions = self._observer.on_requests(self._clock.now())
        verdicts = await self._carry_out(decisions)
        await self._carry_out(
            [Decision(d.subject, d.why, requests_done=d.requests_done) for d in _never(decisions, verdicts)]
        )

    async def _settle_dependencies(self) -> None:
        """Ask the store for ends that the World has not seen, then let in and fail those who waited."""
        awaited = self._world.awaited
        if awaited.unknown:
            asked = sorted(awaited.unknown)[:MOST_ASKED]
            stands = await self._store.stands(asked)
            awaited.learn(asked, {task: TaskEnd(at.state, at.failed_by) for task, at in stands.items()})
        while decisions := settle_dependencies(self._world.awaited, self._world.tasks, self._clock.now()):
            if set(await self._carry_out(decisions)) != {COMMITTED}:
                return

    async def _plan(self) -> None:
        cursor, turns = None, 1
        while True:
            now, forecasts = self._clock.now(), self.foresight.forecasts
            part = Slice(self._world, self._policy, now, cursor, self._cache, forecasts)
            taken = 0
            while not part.is_last and (taken < turns or part.is_searching):
                part.take_turn()
                taken += 1
                await asyncio.sleep(0)
            plan = part.plan()
            await self._carry_out(self.foresight.compare(self._world, plan.decisions, now))
            cursor, turns = plan.cursor, MOST_TURNS
            if cursor is None or self._winding_up:
                return

    async def _consolidate(self) -> None:
        """Move runs for a task that the plan has left waiting, if that is allowed and helps."""
        now = self._clock.now()
        decision = self._consolidation.look(self._world, self._policy, now, self.foresight.forecasts)
        if decision is not None and COMMITTED in await self._carry_out([decision]):
            self._consolidation.count(decision, now)

    async def _foresee(self, most_seconds: float = FORESEE_SECONDS) -> None:
        """Work out anew when the first of those who wait will start. What is not done in a moment goes on in
        the next cycle, so that neither reports nor plans wait for it."""
        now, loop = self._clock.now(), asyncio.get_running_loop()
        until = loop.time() + most_seconds
        while self.foresight.go_on(self._world, self._policy, now):
            if loop.time() >= until:
                self._rhythm.wake()
                return
            await asyncio.sleep(0)

    async def _carry_out(self, decisions: Sequence[Decision]) -> Sequence[CommitVerdict]:
        """Commit, then dispatch what was committed. The store's listener has updated the World by then."""
        if not decisions:
            return ()
        self._check_tenure()
        writing = [decision for decision in decisions if not decision.is_empty()]
        written = await self._commit(writing) if writing else ()
        fate = {id(decision): verdict for decision, verdict in zip(writing, written, strict=True)}
        verdicts = [fate.get(id(decision), CommitVerdict.COMMITTED) for decision in decisions]
        accepted = {d.subject for d, v in zip(decisions, verdicts, strict=True) if v is COMMITTED}
        for decision, verdict in zip(decisions, verdicts, strict=True):
            if verdict is COMMITTED:
                self._undispatched.append(decision)
            elif decision.subject not in accepted and verdict is not CommitVerdict.UNAVAILABLE:
                self._refused.add(decision.subject)
            if verdict in _NEVER:
                log.error(
                    "the database refused a decision",
                    subject=decision.subject, why=decision.why, fault=verdict.value,
                )  # fmt: skip
        if CommitVerdict.STALE in verdicts:
            self._rhythm.wake()
        await self._dispatch()
        if CommitVerdict.UNAVAILABLE in verdicts:
            raise StoreUnavailable("the database went away in the middle of a commit")
        return verdicts

    async def _commit(self, decisions: Sequence[Decision]) -> Sequence[CommitVerdict]:
        written = self._store.commit(self.tenure.term, decisions)
        verdicts, _ = await asyncio.gather(written, self._dispatcher.look_up(decisions))
        return verdicts

    def _check_tenure(self) -> None:
        """Raises TenureOver."""
        if self.tenure.is_over(self._ticks()):
            raise TenureOver(f"term {self.tenure.term} was not renewed in time; stop leading")

    def _count_refusals(self) -> None:
        """Reports have their own count. Raises PictureDiverged."""
        self._in_vain = {subject: self._in_vain.get(subject, 0) + 1 for subject in self._refused}
        for subject, cycles in self._in_vain.items():
            if cycles == TRIES:
                raise PictureDiverged(_DIVERGED.format(subject))

    async def _dispatch(self) -> None:
        """Send the orders of what was committed. Raises TenureOver, and StoreUnavailable: then they stay for
        the next cycle. Time may pass until they leave; the executor looks at the tenure once more."""
        if self._undispatched:
            self._check_tenure()
            self._heard.extend(await self._dispatcher.send(self._undispatched))
            self._undispatched = []


def _never(decisions: Sequence[Decision], verdicts: Sequence[CommitVerdict]) -> list[Decision]:
    """Those that the database would refuse again, however often they are tried."""
    return [d for d, verdict in zip(decisions, verdicts, strict=True) if verdict in _NEVER]


def _size_bytes(report: Report) -> int:
    """Of what makes a report large."""
    match report:
        case Checkpointed(data=bytes(data)) | Ended(result=bytes(data)):
            return len(data)
        case _:
            return 0
