"""Every operation with a fault at every boundary of its statements and COMMIT.

Two faults: the connection is cut and the process continues, or the process is killed and another one takes
over. Afterwards rows and log must agree, no transaction may be there in part, answers must be true, and every
task must still reach its end.
"""

import argparse
import asyncio
import gc
import os
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gpubroker_server.adapters.sql import connections, database
from gpubroker_server.adapters.sql.database import Database
from gpubroker_server.adapters.sql.store import SqlStore
from gpubroker_server.core.domain.units import Term
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import CommitVerdict, StoreUnavailable
from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import Engine

from tests.chaos.database import DURABILITY, Checker, Reader, a_database, picture_of
from tests.chaos.faults import Fault, FaultPoint, FaultySession
from tests.chaos.operations import OPERATIONS, Operation
from tests.chaos.scene import Scene
from tests.contracts.scenes import next_term, picture

_SURVIVED = 3
_REFUSED = frozenset({CommitVerdict.UNAVAILABLE, CommitVerdict.STALE})

Point = tuple[int, str]
"""A boundary of an operation: its number, and its name."""


class Violation(AssertionError):
    """An invariant does not hold after a fault."""


@dataclass
class Result:
    operations: int = 0
    points: Counter[str] = field(default_factory=Counter)
    """Fault -> number of boundaries at which it was injected."""

    def __str__(self) -> str:
        tried = ", ".join(f"{fault} at {count} points" for fault, count in sorted(self.points.items()))
        return f"{self.operations} operations, {tried}: nothing lost, nothing in part"


class Footprint(NamedTuple):
    """What a transaction changes: shows whether it was committed."""

    position: int
    term: int
    tokens: int
    tasks: int

    def since(self, before: "Footprint") -> "Footprint":
        """After a lost answer a leader may take one more term, which counts as one."""
        return Footprint(
            self.position - before.position,
            min(1, self.term - before.term),
            self.tokens - before.tokens,
            self.tasks - before.tasks,
        )


NOTHING = Footprint(0, 0, 0, 0)


class Undisturbed(Struct, frozen=True):
    """An operation without a fault."""

    boundaries: tuple[str, ...]
    footprint: Footprint


class Attempt(Struct, frozen=True):
    """One attempt at an operation: its task, and the state of the process before it."""

    id: str
    before: Footprint
    world: World
    where: str


class Sweep:
    """On one database, which nothing else uses."""

    def __init__(self, url: str, every: int = 1) -> None:
        """`every`: of each operation's boundaries only every so many are tried, and another first one than of
        the operation before."""
        self._url = url
        self._every = every
        self._reader = Reader(url)
        self._checker = Checker(self._reader)
        self._term = Term(0)
        self._ids = iter(range(1, 1_000_000))
        self._accepted: set[str] = set()
        self._readers: Engine | None = None
        """Kept over attempts without connections: setting it up takes a third of each attempt."""
        self.result = Result()

    def run(self, faults: Iterable[Fault], operations: Mapping[str, Operation] = OPERATIONS) -> Result:
        """Raises Violation."""
        with without_startup_checks():
            asyncio.run(self._initialize())
            gc.freeze()
            self.result.operations = len(operations)
            for number, (name, operation) in enumerate(operations.items()):
                for fault in faults:
                    expected = asyncio.run(self._run_undisturbed(fault, operation))
                    points = list(enumerate(expected.boundaries))
                    points = points[number % min(self._every, len(points)) :: self._every]
                    if fault is Fault.CUT:
                        asyncio.run(self._cut_at(points, name, operation, expected))
                    else:
                        self._kill_at(points, name, operation, expected)
                    asyncio.run(self._check_all_ended(name))
                    self.result.points[fault] += len(points)
        return self.result

    async def _initialize(self) -> None:
        async with self._opened() as (scene, _):
            scene.term = await next_term(scene.store)
            await scene.commit(scene.node_answers())

    async def _run_undisturbed(self, fault: Fault, operation: Operation) -> Undisturbed:
        async with self._opened() as (scene, fault_point):
            id, before = await self._prepare(scene, operation)
            fault_point.arm(fault, None)
            await operation.act(scene, id)
            boundaries, done = tuple(fault_point.passed), self._footprint().since(before)
            await self._end(scene, id, "without a fault")
            return Undisturbed(boundaries, done)

    # The connection is cut, and the process continues

    async def _cut_at(
        self, points: Sequence[Point], name: str, operation: Operation, expected: Undisturbed
    ) -> None:
        async with self._opened() as (scene, fault_point):
            for point, boundary in points:
                where = f"{name}, cut {boundary}"
                id, before = await self._prepare(scene, operation)
                fault_point.arm(Fault.CUT, point)
                is_done = await is_confirmed(operation.act(scene, id))
                fault_point.disarm()
                kept = self._footprint().since(before)
                if kept != (expected.footprint if is_done else NOTHING):
                    answer = "done" if is_done else "refused"
                    raise Violation(
                        f"{where}: answered {answer}, but committed was {kept} of {expected.footprint}"
                    )
                if picture(scene.world) != await picture_of(scene.store):
                    raise Violation(f"{where}: the World of the process differs from the rows")
                await self._end(scene, id, where)

    # The process is killed, and another one takes over

    def _kill_at(
        self, points: Sequence[Point], name: str, operation: Operation, expected: Undisturbed
    ) -> None:
        killed: Attempt | None = None
        for point, boundary in points:
            where = f"{name}, killed {boundary}"
            killed = asyncio.run(self._prepare_next(killed, expected, operation, where))
            self._kill_child(operation, killed, point)
        asyncio.run(self._take_over(killed, expected))

    async def _prepare_next(
        self, killed: Attempt | None, expected: Undisturbed, operation: Operation, where: str
    ) -> Attempt:
        """Take over from the killed process, and prepare the next attempt."""
        async with self._opened() as (scene, _):
            if killed is not None:
                await self._check_committed(scene, killed, expected)
            id, before = await self._prepare(scene, operation)
            return Attempt(id, before, scene.world, where)

    async def _take_over(self, killed: Attempt | None, expected: Undisturbed) -> None:
        async with self._opened() as (scene, _):
            if killed is not None:
                await self._check_committed(scene, killed, expected)

    async def _check_committed(self, scene: Scene, killed: Attempt, expected: Undisturbed) -> None:
        found = self._footprint()
        if (kept := found.since(killed.before)) not in (NOTHING, expected.footprint):
            raise Violation(f"{killed.where}: a part was committed: {kept} of {expected.footprint}")
        scene.term = Term(found.term)
        await self._end(scene, killed.id, killed.where)

    def _kill_child(self, operation: Operation, attempt: Attempt, point: int) -> None:
        child = os.fork()
        if child == 0:
            try:
                gc.disable()  # it would only copy pages that are shared with the parent
                asyncio.run(self._act_until_killed(operation, attempt, point))
            finally:
                os._exit(_SURVIVED)  # without the parent's exit handlers
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            raise Violation(f"{attempt.where}: the process was not killed; status {status}")

    async def _act_until_killed(self, operation: Operation, attempt: Attempt, point: int) -> None:
        async with self._opened(attempt.world) as (scene, fault_point):
            fault_point.arm(Fault.KILL, point)
            await operation.act(scene, attempt.id)

    # For both

    async def _prepare(self, scene: Scene, operation: Operation) -> tuple[str, Footprint]:
        id = f"t{next(self._ids):05}"
        await self._read_log_before_pruning(operation, scene)
        await operation.before(scene, id)
        await self._read_log_before_pruning(operation, scene)
        return id, self._footprint()

    async def _read_log_before_pruning(self, operation: Operation, scene: Scene) -> None:
        if operation.prunes:
            self._checker.may_be_pruned = True
            if wrong := await self._checker.check(scene.store):
                raise Violation("; ".join(wrong))

    async def _end(self, scene: Scene, id: str, where: str) -> None:
        """Check the database, and bring every task to its end."""
        if wrong := await self._checker.check(scene.store, since=id):
            raise Violation(f"{where}: {'; '.join(wrong)}")
        await scene.finish()

    async def _check_all_ended(self, name: str) -> None:
        """Every accepted task has ended, and rows and log agree."""
        async with self._opened() as (scene, _):
            wrong = await self._checker.check(scene.store)
        ended = {id for (id,) in self._reader.rows("SELECT id FROM task WHERE finished")}
        lost = self._accepted - ended - self._checker.pruned()
        if wrong or lost:
            raise Violation(f"{name}, in the end: {'; '.join(wrong)}; accepted but not ended: {sorted(lost)}")

    def _footprint(self) -> Footprint:
        [found] = self._reader.rows(
            "SELECT position, (SELECT term FROM leadership), (SELECT count(*) FROM token), "
            "(SELECT count(*) FROM task) FROM log_head"
        )
        return Footprint(*found)

    @asynccontextmanager
    async def _opened(self, world: World | None = None) -> AsyncIterator[tuple[Scene, FaultPoint]]:
        """With a World read from the rows, unless one is given."""
        known, fault_point = database.open_database(self._url), FaultPoint()
        self._readers = self._readers or known.readers
        store = SqlStore(with_faults(replace(known, readers=self._readers), fault_point))
        try:
            scene = await Scene.on(store, self._term, world)
            yield scene, fault_point
            self._term = scene.term
            self._accepted |= scene.accepted
        finally:
            await store.close()


def with_faults(known: Database, fault_point: FaultPoint) -> Database:
    connect = known.connect_term
    return replace(
        known,
        session=FaultySession(known.session, fault_point),
        connect_term=None if connect is None else lambda: FaultySession(connect(), fault_point),
    )


async def is_confirmed(answer: Any) -> bool:
    """Whether the call answered that it is done, and not that it was refused."""
    try:
        given = await answer
    except StoreUnavailable:
        return False
    answers = given if isinstance(given, list | tuple) else [given]
    return not any(isinstance(one, CommitVerdict) and one in _REFUSED for one in answers)


@contextmanager
def without_startup_checks() -> Iterator[None]:
    """Skip the checks of server, schema and host, since the database is opened hundreds of times."""
    with ExitStack() as stack:
        for module, name in (
            (database, "bring_to"),
            (database, "check_not_moved"),
            (connections, "check_server"),
        ):
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, lambda *_: "head")
        yield


def add_options(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--database-url", help="an empty database with the current schema")
    where.add_argument("--database", choices=sorted(DURABILITY), help="create a database of this kind")
    parser.add_argument(
        "--operation",
        action="append",
        choices=sorted(OPERATIONS),
        metavar="NAME",
        help=f"operation: {', '.join(sorted(OPERATIONS))} (may be repeated)",
    )
    faults = [Fault.CUT.value, Fault.KILL.value]
    parser.add_argument("--fault", action="append", choices=faults, help="fault to inject (may be repeated)")
    parser.add_argument("--every", type=int, default=1, help="try only every so many of the boundaries")


def command(options: argparse.Namespace) -> None:
    faults = [Fault(name) for name in options.fault or (Fault.CUT, Fault.KILL)]
    operations = {name: OPERATIONS[name] for name in options.operation or OPERATIONS}
    if options.database_url is not None:
        print(Sweep(options.database_url, options.every).run(faults, operations))
        return
    with tempfile.TemporaryDirectory() as folder, a_database(options.database, Path(folder)) as url:
        print(Sweep(url, options.every).run(faults, operations))
