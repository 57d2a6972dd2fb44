"""The loop of the leader: hear, decide, commit, act. One cycle at a time, nothing acts before its commit."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from service.broker.dispatch import Dispatcher
from service.broker.observe import Observer, next_batch
from service.core.cycle import plan_cycle
from service.core.events import Event
from service.core.orders import Report
from service.core.plan import Decision
from service.core.policy import Policy
from service.core.reconcile import take_over
from service.core.units import Term
from service.core.world import World
from service.ports import Clock, CommitVerdict, Executor, StoreUnavailable, TaskStore

log = structlog.get_logger("gpubroker.broker")

TICK_SECONDS = 0.25
"""How often deadlines and due retries are looked at when nothing else happens."""

PACE_SECONDS = 0.005
"""Cycles begin at least so far apart: what came in meanwhile shares one plan and two commits. After a quiet
moment the first one begins at once."""

SLICE = 256
"""Tasks examined before the event loop gets its turn again."""

STALE_TRIES = 20
"""A leader is the only writer of states; if its picture is refused so often, the picture is wrong."""

STORE_PATIENCE_SECONDS = 1.0
"""Pause before a commit is tried again when the database could not be reached."""


class PictureDiverged(Exception):
    """The World in memory no longer matches the rows; nothing was written from it."""


@dataclass(slots=True)
class Leadership:
    """What the rest of the process may know of the leader."""

    term: Term = Term(0)
    leading: bool = False


class Leader:
    """Leads from `run` until it is cancelled, or until another leader's term ends it (StaleTerm)."""

    def __init__(
        self,
        *,
        name: str,
        world: World,
        policy: Policy,
        store: TaskStore,
        executor: Executor,
        observer: Observer,
        dispatcher: Dispatcher,
        clock: Clock,
    ) -> None:
        self._name = name
        self._world = world
        self._policy = policy
        self._store = store
        self._executor = executor
        self._observer = observer
        self._dispatcher = dispatcher
        self._clock = clock
        self._heard: deque[Report] = deque()
        self._undispatched: list[Decision] = []
        """Committed, and their orders not yet on their way: what a start needs is in the database."""
        self._woken = asyncio.Event()
        self.leadership = Leadership()

    def on_events(self, events: Sequence[Event]) -> None:
        """Wake up for what gateways inserted; the leader's own commits need no second look."""
        if any(event.kind in {"task.submitted", "request.made"} for event in events):
            self._woken.set()

    def hear(self, reports: Sequence[Report]) -> None:
        """Keep what agents said, in order, for the next cycle."""
        self._heard.extend(reports)
        self._woken.set()

    async def take_over(self) -> None:
        """Begin a term: every older leader's commits fail, and no node is used before its agent answered."""
        self.leadership.term = await self._store.take_term(self._name)
        self.leadership.leading = True
        log.info("leading", term=self.leadership.term)
        decision = take_over(self._world)
        await self._carry_out([decision] if decision else [])

    async def run(self) -> None:
        await self.take_over()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._listen())
                group.create_task(self._lead())
        finally:
            self.leadership.leading = False

    async def _listen(self) -> None:
        await self._executor.start(self.leadership.term)
        while True:
            self.hear(await self._executor.reports())

    async def _lead(self) -> None:
        loop = asyncio.get_running_loop()
        began = 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._woken.wait()
            await asyncio.sleep(max(0.0, began + PACE_SECONDS - loop.time()))
            began = loop.time()
            self._woken.clear()
            try:
                await self.cycle()
            except StoreUnavailable as fault:
                log.warning("database not reached; trying again", fault=str(fault))
                await asyncio.sleep(STORE_PATIENCE_SECONDS)
                self._woken.set()

    async def cycle(self) -> None:
        """One turn: reports, requests, deadlines, then the plan. Raises StaleTerm, StoreUnavailable."""
        await self._dispatch()
        await self._settle_reports()
        await self._carry_out(self._observer.on_requests(self._clock.now()))
        await self._carry_out(self._observer.on_time(self._clock.now()))
        await self._plan()

    async def _settle_reports(self) -> None:
        """A report stays in hand until what it means is committed. Raises PictureDiverged."""
        left, tries = len(self._heard), STALE_TRIES
        while left > 0:
            batch = next_batch(self._heard)
            decisions = await self._observer.on_reports(batch, self._clock.now())
            verdicts = await self._carry_out(decisions)
            if CommitVerdict.STALE not in verdicts:
                for _ in batch:
                    self._heard.popleft()
                left, tries = left - len(batch), STALE_TRIES
                continue
            log.info("reports met a changed row; looking again", reports=len(batch))
            tries -= 1
            if tries == 0:
                raise PictureDiverged(
                    f"{STALE_TRIES} times in a row the database refused what the leader made of its reports; "
                    "restart the service, which reads the picture anew"
                )

    async def _plan(self) -> None:
        cursor = None
        while True:
            plan = plan_cycle(self._world, self._policy, self._clock.now(), cursor=cursor, budget=SLICE)
            await self._carry_out(plan.decisions)
            cursor = plan.cursor
            if cursor is None:
                return
            await asyncio.sleep(0)

    async def _carry_out(self, decisions: Sequence[Decision]) -> Sequence[CommitVerdict]:
        """Commit, then dispatch what was committed. The store's listener has updated the World by then."""
        if not decisions:
            return ()
        writing = [decision for decision in decisions if not decision.is_empty()]
        verdicts = await self._store.commit(self.leadership.term, writing) if writing else ()
        fate = {id(decision): verdict for decision, verdict in zip(writing, verdicts, strict=True)}
        for decision in decisions:
            verdict = fate.get(id(decision), CommitVerdict.COMMITTED)
            if verdict is CommitVerdict.COMMITTED:
                self._undispatched.append(decision)
            elif verdict is CommitVerdict.REFUSED:
                log.error("the database refused a decision", subject=decision.subject, why=decision.why)
        if CommitVerdict.STALE in verdicts:
            self._woken.set()
        await self._dispatch()
        return verdicts

    async def _dispatch(self) -> None:
        """Send the orders of what was committed. Raises StoreUnavailable; they stay for the next cycle."""
        if self._undispatched:
            self._heard.extend(await self._dispatcher.send(self._undispatched))
            self._undispatched = []
