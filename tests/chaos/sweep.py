"""Every operation, broken at every boundary of every statement and COMMIT; then what is left is looked at.

Two ways to break: the connection is cut and the process goes on, or the process is killed and another one
goes on with what it finds. Afterwards rows and log must say the same, no half of anything may be there,
what was answered must be true, and every task must still come to its end.
"""

import asyncio
import gc
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from gpubroker_server.adapters.sql import connections, database
from gpubroker_server.adapters.sql.database import Database
from gpubroker_server.adapters.sql.store import SqlStore
from gpubroker_server.core.domain.units import Term
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import CommitVerdict, StoreUnavailable
from sqlalchemy import Engine

from tests.chaos.faults import Breaker, Fault, FaultySession
from tests.chaos.operations import OPERATIONS, Operation
from tests.chaos.rows import Answers, Rows, picture_of
from tests.chaos.scene import Scene
from tests.contracts.scenes import next_term, picture

_SURVIVED = 3
_REFUSED = frozenset({CommitVerdict.UNAVAILABLE, CommitVerdict.STALE})


class Broken(AssertionError):
    """Something that must hold did not, after this fault."""


@dataclass
class Swept:
    operations: int = 0
    points: Counter[str] = field(default_factory=Counter)
    """Fault -> boundaries at which it was tried."""

    def __str__(self) -> str:
        tried = ", ".join(f"{fault} at {count} points" for fault, count in sorted(self.points.items()))
        return f"{self.operations} operations, {tried}: nothing lost, nothing half"


class Stamp(NamedTuple):
    """What tells whether a transaction was kept."""

    position: int
    term: int
    tokens: int
    tasks: int

    def since(self, before: "Stamp") -> "Stamp":
        """A lost answer makes a leader take one more term; that is as good as one."""
        return Stamp(
            self.position - before.position,
            min(1, self.term - before.term),
            self.tokens - before.tokens,
            self.tasks - before.tasks,
        )


NOTHING = Stamp(0, 0, 0, 0)


@dataclass(frozen=True)
class Plan:
    """Of an operation that nothing disturbs."""

    boundaries: tuple[str, ...]
    done: Stamp


@dataclass(frozen=True)
class Life:
    """Of a process that is about to act for a task, with the picture that it has then."""

    id: str
    before: Stamp
    world: World
    where: str


class Sweep:
    """Of one migrated database, whose every transaction is this object's."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._answers = Answers(url)
        self._rows = Rows(self._answers)
        self._term = Term(0)
        self._ids = iter(range(1, 1_000_000))
        self._accepted: set[str] = set()
        self._readers: Engine | None = None
        """Without connections between lives, but with all that it takes a third of each life to learn."""
        self.swept = Swept()

    def run(self, faults: Iterable[Fault], operations: Mapping[str, Operation] = OPERATIONS) -> Swept:
        """Raises Broken."""
        with migrated_before():
            asyncio.run(self._settle_in())
            gc.freeze()
            self.swept.operations = len(operations)
            for name, operation in operations.items():
                for fault in faults:
                    plan = asyncio.run(self._rehearse(fault, operation))
                    if fault is Fault.CUT:
                        asyncio.run(self._cut_everywhere(name, operation, plan))
                    else:
                        self._kill_everywhere(name, operation, plan)
                    asyncio.run(self._close_the_books(name))
                    self.swept.points[fault] += len(plan.boundaries)
        return self.swept

    async def _settle_in(self) -> None:
        async with self._opened() as (scene, _):
            scene.term = await next_term(scene.store)
            await scene.carry(scene.node_answers())

    async def _rehearse(self, fault: Fault, operation: Operation) -> Plan:
        async with self._opened() as (scene, breaker):
            id, before = await self._prepare(scene, operation)
            breaker.arm(fault, None)
            await operation.act(scene, id)
            boundaries, done = tuple(breaker.passed), self._stamp().since(before)
            await self._end(scene, id, "undisturbed")
            return Plan(boundaries, done)

    # The connection is cut, and the process goes on

    async def _cut_everywhere(self, name: str, operation: Operation, plan: Plan) -> None:
        async with self._opened() as (scene, breaker):
            for point, boundary in enumerate(plan.boundaries):
                where = f"{name}, cut {boundary}"
                id, before = await self._prepare(scene, operation)
                breaker.arm(Fault.CUT, point)
                is_told = await said(operation.act(scene, id))
                breaker.disarm()
                kept = self._stamp().since(before)
                if kept != (plan.done if is_told else NOTHING):
                    told = "done" if is_told else "refused"
                    raise Broken(f"{where}: it was {told}, and what was kept is {kept} of {plan.done}")
                if picture(scene.world) != await picture_of(scene.store):
                    raise Broken(f"{where}: whoever went on has another picture than the rows")
                await self._end(scene, id, where)

    # The process is killed, and another one finds what is left

    def _kill_everywhere(self, name: str, operation: Operation, plan: Plan) -> None:
        dead: Life | None = None
        for point, boundary in enumerate(plan.boundaries):
            where = f"{name}, killed {boundary}"
            dead = asyncio.run(self._take_over_from(dead, plan, operation, where))
            self._die(operation, dead, point)
        asyncio.run(self._bury(dead, plan))

    async def _take_over_from(self, dead: Life | None, plan: Plan, operation: Operation, where: str) -> Life:
        """Go on where the dead process left off, and get to where the next one dies."""
        async with self._opened() as (scene, _):
            if dead is not None:
                await self._settle(scene, dead, plan)
            id, before = await self._prepare(scene, operation)
            return Life(id, before, scene.world, where)

    async def _bury(self, dead: Life | None, plan: Plan) -> None:
        async with self._opened() as (scene, _):
            if dead is not None:
                await self._settle(scene, dead, plan)

    async def _settle(self, scene: Scene, dead: Life, plan: Plan) -> None:
        found = self._stamp()
        if (kept := found.since(dead.before)) not in (NOTHING, plan.done):
            raise Broken(f"{dead.where}: a part was kept, {kept} of {plan.done}")
        scene.term = Term(found.term)
        await self._end(scene, dead.id, dead.where)

    def _die(self, operation: Operation, life: Life, point: int) -> None:
        child = os.fork()
        if child == 0:
            try:
                gc.disable()  # it would only copy what is the parent's as well
                asyncio.run(self._act_and_die(operation, life, point))
            finally:
                os._exit(_SURVIVED)  # nothing of the parent's is to be cleaned up here
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            raise Broken(f"{life.where}: the process was not killed there; status {status}")

    async def _act_and_die(self, operation: Operation, life: Life, point: int) -> None:
        async with self._opened(life.world) as (scene, breaker):
            breaker.arm(Fault.KILL, point)
            await operation.act(scene, life.id)

    # Around both

    async def _prepare(self, scene: Scene, operation: Operation) -> tuple[str, Stamp]:
        id = f"t{next(self._ids):05}"
        await self._read_before(operation, scene)
        await operation.before(scene, id)
        await self._read_before(operation, scene)
        return id, self._stamp()

    async def _read_before(self, operation: Operation, scene: Scene) -> None:
        if operation.takes_out:
            self._rows.may_be_gone = True
            if wrong := await self._rows.check(scene.store):
                raise Broken("; ".join(wrong))

    async def _end(self, scene: Scene, id: str, where: str) -> None:
        """Look at what there is, and bring it to its end."""
        if wrong := await self._rows.check(scene.store, since=id):
            raise Broken(f"{where}: {'; '.join(wrong)}")
        await scene.finish()

    async def _close_the_books(self, name: str) -> None:
        """All that was accepted has ended, and the ends are as they should be."""
        async with self._opened() as (scene, _):
            wrong = await self._rows.check(scene.store)
        ended = {id for (id,) in self._answers.to("SELECT id FROM task WHERE finished")}
        lost = self._accepted - ended - self._rows.taken_out()
        if wrong or lost:
            raise Broken(f"{name}, at last: {'; '.join(wrong)}; accepted and not ended: {sorted(lost)}")

    def _stamp(self) -> Stamp:
        [found] = self._answers.to(
            "SELECT position, (SELECT term FROM leadership), (SELECT count(*) FROM token), "
            "(SELECT count(*) FROM task) FROM log_head"
        )
        return Stamp(*found)

    @asynccontextmanager
    async def _opened(self, world: World | None = None) -> AsyncIterator[tuple[Scene, Breaker]]:
        """With a picture from the rows, if it is not given."""
        known, breaker = database.open_database(self._url), Breaker()
        self._readers = self._readers or known.readers
        store = SqlStore(breaking(replace(known, readers=self._readers), breaker))
        try:
            scene = await Scene.on(store, self._term, world)
            yield scene, breaker
            self._term = scene.term
            self._accepted |= scene.accepted
        finally:
            await store.close()


def breaking(known: Database, breaker: Breaker) -> Database:
    connect = known.connect_term
    return replace(
        known,
        session=FaultySession(known.session, breaker),
        connect_term=None if connect is None else lambda: FaultySession(connect(), breaker),
    )


async def said(answer: Any) -> bool:
    """Whether whoever asked was told that it is done. What was not possible must have been refused."""
    try:
        given = await answer
    except StoreUnavailable:
        return False
    answers = given if isinstance(given, list | tuple) else [given]
    return not any(isinstance(one, CommitVerdict) and one in _REFUSED for one in answers)


@contextmanager
def migrated_before() -> Iterator[None]:
    """Hundreds of times the database is opened: whether its server, its schema and its place are right, which
    has been found out before, is not asked again."""
    with ExitStack() as put_back:
        for module, name in (
            (database, "bring_to"),
            (database, "check_served_here"),
            (connections, "check_server"),
        ):
            put_back.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, lambda *_: "head")
        yield
