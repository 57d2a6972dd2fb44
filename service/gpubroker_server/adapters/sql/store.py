"""The TaskStore on SQLite and PostgreSQL: one writer thread, and a few that read."""

import asyncio
from asyncio import get_running_loop
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DataError, DBAPIError

from gpubroker_server.adapters.sql import reads, terms
from gpubroker_server.adapters.sql import statements as sql
from gpubroker_server.adapters.sql.database import READERS, Database, migrate, open_database
from gpubroker_server.adapters.sql.group import Change, NewBatch, NewRequest, NewTask, Unit
from gpubroker_server.adapters.sql.hints import Hints
from gpubroker_server.adapters.sql.last_values import SqlLastValues
from gpubroker_server.adapters.sql.objects import SqlObjects
from gpubroker_server.adapters.sql.pruning import prune_step
from gpubroker_server.adapters.sql.recent import Recent
from gpubroker_server.adapters.sql.rows import token_row
from gpubroker_server.adapters.sql.session import DatabaseRefused, Session
from gpubroker_server.adapters.sql.writer import BeginAt, CatchUp, Work, Writer
from gpubroker_server.core.domain.decisions import Decision, Request
from gpubroker_server.core.domain.leader_term import LeaderRow
from gpubroker_server.core.domain.policy import HALF_LIFE_SECONDS, Cutoffs
from gpubroker_server.core.domain.units import Instant, Position, Seconds, TaskId, Term
from gpubroker_server.core.world.events import Event
from gpubroker_server.ports.store import (
    BatchSubmission,
    CommitVerdict,
    EventListener,
    HeldBack,
    KnownKey,
    RunSpec,
    Snapshot,
    StaleTerm,
    Stand,
    StoredCheckpoint,
    StoredResult,
    StoreUnavailable,
    Submission,
    SubmitOutcome,
    SubmitVerdict,
    TaskFilter,
    TaskRecord,
    TokenRow,
    Unstorable,
)

__all__ = ["DatabaseRefused", "SqlStore", "migrate", "open_store"]

T = TypeVar("T")

EVENTS_PER_TURN = 500
"""To take over so many takes listeners some milliseconds."""


async def open_store(
    url: str,
    *,
    pooled: bool = False,
    usage_half_life_seconds: Seconds = HALF_LIFE_SECONDS,
) -> "SqlStore":
    """Open `sqlite:///path` or `postgresql://...`, bringing its schema to the newest first.

    A SQLite file is locked until `close`. On PostgreSQL any number of processes may open one database, of
    which one migrates at a time. `pooled`: behind a pooler that hands connections out by transaction. Raises
    DatabaseRefused.
    """
    database = await asyncio.to_thread(open_database, url, pooled=pooled)
    try:
        return await asyncio.to_thread(SqlStore, database, usage_half_life_seconds)
    except BaseException:
        database.session.close()
        database.readers.dispose()
        database.release()
        raise


class SqlStore(SqlLastValues, SqlObjects):
    """Writes go to the writer thread and are answered after their commit; reads take a reader's thread."""

    def __init__(self, database: Database, usage_half_life_seconds: Seconds = HALF_LIFE_SECONDS) -> None:
        self._database = database
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="gpubroker-reader")
        self._listeners: list[EventListener] = []
        self._fault: Exception | None = None
        """What a listener raised: from then on nothing is written."""
        self._recent = Recent()
        self._of_this_turn: list[Work] = []
        self.tokens_changed = asyncio.Event()
        """Set by `catch_up` when tokens came or went; cleared by whoever has read them."""
        self._token_changes = 0
        self.resigned = asyncio.Event()
        """Set by `keep_hints` when a leader has let its term go; cleared by whoever looks at its row."""
        self._hints = None if database.listener is None else Hints(database.listener)
        connect = database.connect_term
        self._terms = None if connect is None else terms.OwnConnection(connect)
        self._undelivered: deque[tuple[Sequence[Event], Sequence[Work]]] = deque()
        """What the writer has committed and nobody has heard of."""
        self._writer = Writer(
            database.session, self._query(reads.head), self._deliver, usage_half_life_seconds
        )

    def listen(self, listener: EventListener) -> None:
        self._listeners.append(listener)

    @property
    def is_shared(self) -> bool:
        """Whether other processes may write to the same database."""
        return self._database.is_shared

    @property
    def gives_hints(self) -> bool:
        """Whether there is anything to keep by `keep_hints`."""
        return self._hints is not None

    async def catch_up(self) -> bool:
        """Hand to the listeners what other processes have appended; True if more of it follows.

        Raises LogShortened if some of it is no longer there, and StoreUnavailable.
        """
        work = CatchUp(get_running_loop())
        self._hand_over(work)
        more, token_changes = await work.future
        if token_changes != self._token_changes:
            self._token_changes = token_changes
            self.tokens_changed.set()
        return bool(more)

    async def go_on_at(self, position: Position) -> None:
        """What is up to there, listeners know from a snapshot."""
        work = BeginAt(get_running_loop(), position)
        self._hand_over(work)
        await work.future

    async def keep_hints(self, on_hint: Callable[[], None]) -> None:
        """Tell others that something was written, and hear it of them, until cancelled."""
        if self._hints is not None:
            await self._hints.keep(on_hint, self.resigned.set)

    async def submit(self, submission: Submission) -> SubmitOutcome:
        self._recent.note_submission(submission)
        [answer] = await self._write([NewTask(submission)])
        if answer.verdict is not SubmitVerdict.ACCEPTED:
            self._recent.forget(submission.task.id)
        return answer  # type: ignore[no-any-return]  # what NewTask answers

    async def submit_batch(self, batch: BatchSubmission) -> SubmitOutcome:
        [answer] = await self._write([NewBatch(batch)])
        return answer  # type: ignore[no-any-return]  # what NewBatch answers

    async def known_key(self, tenant: str, key: str) -> KnownKey | None:
        return await self._read(reads.known_key, tenant, key)

    async def batch_answer(self, first: TaskId) -> str:
        return await self._read(reads.batch_answer, first)

    async def request(self, request: Request) -> None:
        await self._write([NewRequest(request)])

    async def commit(self, term: Term, decisions: Sequence[Decision]) -> Sequence[CommitVerdict]:
        verdicts = [CommitVerdict.UNSTORABLE] * len(decisions)
        units: dict[int, Change] = {}
        for at, decision in enumerate(decisions):
            with suppress(Unstorable):
                units[at] = Change(term, decision)
        if units:
            for at, verdict in zip(units, await self._write(list(units.values())), strict=True):
                verdicts[at] = verdict
        return verdicts

    async def leader(self) -> LeaderRow:
        if self._terms is None:
            return await self._read(reads.leader)
        return await self._terms.run(terms.read_leader)

    async def take_term(self, holder: str, ttl_seconds: Seconds, *, instead_of: LeaderRow) -> Term | None:
        return await self._on_leader(terms.take_term(holder, ttl_seconds, instead_of))

    async def renew(self, term: Term, ttl_seconds: Seconds) -> None:
        if not await self._on_leader(terms.renew_term(term, ttl_seconds)):
            leader = await self.leader()
            raise StaleTerm(f"term {term} is over: {leader.holder} leads term {leader.term}; stop leading")

    async def resign(self, term: Term) -> None:
        await self._on_leader(terms.resign_term(term))

    async def put_token(self, token: TokenRow, *, by: str) -> bool:
        def act(session: Session) -> bool:
            if not session.fetch(sql.ADD_TOKENS, [token_row(token)]):
                # The name is taken: by another one, or by this very one if the answer to its commit was lost.
                return session.fetch(sql.TOKEN_HASHES, [(token.name,)]) == [(token.sha256,)]
            session.write(sql.COUNT_TOKEN_CHANGE, [(1,)])
            session.write(sql.INSERT_AUDIT, [(session.now(), token.tenant, by, "token.put", token.name, "")])
            return True

        return await self._write_alone(act)

    async def drop_token(self, name: str, *, by: str) -> bool:
        def act(session: Session) -> bool:
            for _, tenant in session.fetch(sql.DROP_TOKENS, [(name,)]):
                session.write(sql.COUNT_TOKEN_CHANGE, [(1,)])
                session.write(sql.INSERT_AUDIT, [(session.now(), tenant, by, "token.dropped", name, "")])
                return True
            return False

        return await self._write_alone(act)

    async def blobs(self) -> str | None:
        """Which directory of objects belongs to this database; None before anything was claimed."""
        return await self._read(reads.blobs)

    async def claim_blobs(self, directory: str, *, instead_of: str) -> str:
        """What it knows of its directory from now on: this, or what took the place of the other before."""

        def act(session: Session) -> str:
            [(first,)] = session.fetch(sql.CLAIM_BLOBS, [(1, directory, instead_of)])
            return str(first)

        return await self._write_alone(act)

    async def audit(self, *, by: str, tenant: str, action: str, subject: str) -> None:
        def act(session: Session) -> None:
            session.write(sql.INSERT_AUDIT, [(session.now(), tenant, by, action, subject, "")])

        await self._write_alone(act)

    async def snapshot(self) -> Snapshot:
        at = await self.database_time()

        def read(connection: Connection) -> Snapshot:
            connection.exec_driver_sql(self._database.begin_snapshot)
            return reads.snapshot(connection, at)

        return await self._read(read)

    async def events(self, after: Position, limit: int, task: TaskId | None = None) -> Sequence[Event]:
        return await self._read(reads.events, after, limit, task)

    async def head(self) -> Position:
        return await self._read(reads.head)

    async def oldest(self) -> Position:
        return await self._read(reads.oldest)

    async def prune(self, term: Term, cutoffs: Cutoffs) -> bool:
        tasks = await self._write_alone(lambda session: prune_step(session, term, cutoffs))
        for task in tasks or ():
            self._recent.forget(task)
        return tasks is not None

    async def record(self, task: TaskId) -> TaskRecord | None:
        return self._recent.record(task) or await self._read(reads.record, task)

    async def records(self, wanted: TaskFilter) -> Sequence[TaskRecord]:
        return await self._read(reads.records, wanted)

    async def stands(self, tasks: Sequence[TaskId]) -> Mapping[TaskId, Stand]:
        return await self._read(reads.stands, tasks) if tasks else {}

    async def specs(self, tasks: Sequence[TaskId]) -> Mapping[TaskId, RunSpec]:
        known = {task: spec for task in tasks if (spec := self._recent.spec(task)) is not None}
        missing = [task for task in tasks if task not in known]
        return {**known, **await self._read(reads.specs, missing)} if missing else known

    async def result(self, task: TaskId) -> StoredResult | None:
        return self._recent.result(task) or await self._read(reads.result, task)

    async def checkpoints(self, task: TaskId) -> Sequence[StoredCheckpoint]:
        return await self._read(reads.checkpoints, task)

    async def referenced(self, digests: Sequence[str]) -> frozenset[str]:
        return await self._read(reads.referenced, digests)

    async def tokens(self) -> Sequence[TokenRow]:
        return await self._read(reads.tokens)

    async def held_back(self) -> HeldBack | None:
        return await self._read(reads.held_back)

    async def database_time(self) -> Instant:
        return await self._read(reads.now)

    async def close(self) -> None:
        """Write what is waiting, then let go of the database."""
        self._wake_writer()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if self._terms is not None:
            self._terms.close()
        self._readers.shutdown()
        self._database.readers.dispose()
        self._writer.close()
        self._database.release()

    async def _write(self, units: Sequence[Unit]) -> Sequence[Any]:
        return await self._await(Work(get_running_loop(), units))  # type: ignore[no-any-return]  # the units' own

    async def _write_alone(self, act: Callable[[Session], T]) -> T:
        return await self._await(Work(get_running_loop(), alone=act))  # type: ignore[no-any-return]  # act's

    async def _on_leader(self, act: terms.Act[T]) -> T:
        self._check_listeners()
        if self._terms is not None:
            return await self._terms.run(act)
        return (await self._write_alone(act))()

    async def _await(self, work: Work) -> Any:
        self._hand_over(work)
        return await work.future

    def _hand_over(self, work: Work) -> None:
        """What one turn of the event loop asks for reaches the writer at once: each wake-up costs."""
        self._check_listeners()
        if not self._of_this_turn:
            get_running_loop().call_soon(self._wake_writer)
        self._of_this_turn.append(work)

    def _check_listeners(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _wake_writer(self) -> None:
        works, self._of_this_turn = self._of_this_turn, []
        if not works:
            return  # `close` was quicker
        try:
            self._writer.put(works)
        except StoreUnavailable as closed:
            for work in works:
                work.refuse(closed)

    def _deliver(self, events: Sequence[Event], works: Sequence[Work]) -> None:
        for work in works:
            self._recent.note_ends(work.units)
        if self._hints is not None and any(not isinstance(work, CatchUp) for work in works):
            self._hints.send()
        self._undelivered.append((events, works))
        if len(self._undelivered) == 1:
            self._deliver_more()

    def _deliver_more(self) -> None:
        """Much at once is handed out in pieces, in order: whoever needs the event loop meanwhile has it."""
        left = EVENTS_PER_TURN
        while self._undelivered and left > 0:
            events, works = self._undelivered[0]
            self._hand_out(events[:left])
            if len(events) > left:
                self._undelivered[0] = (events[left:], works)
            else:
                self._undelivered.popleft()
                self._finish(works)
            left -= len(events)
        if self._undelivered:
            get_running_loop().call_soon(self._deliver_more)

    def _hand_out(self, events: Sequence[Event]) -> None:
        try:
            if events and self._fault is None:
                for listener in self._listeners:
                    listener(events)
        except Exception as fault:
            self._fault = fault

    def _finish(self, works: Sequence[Work]) -> None:
        for work in works:
            if self._fault is None:
                work.finish()
            else:
                work.refuse(self._fault)

    async def _read(self, query: Callable[..., T], *values: Any) -> T:
        return await get_running_loop().run_in_executor(self._readers, partial(self._query, query, *values))

    def _query(self, query: Callable[..., T], *values: Any) -> T:
        """Read on one of the readers' connections; once more if that one turns out to be broken."""
        for attempt in (1, 2):
            try:
                with self._database.readers.connect() as connection:
                    return query(connection, *values)
            except DataError as error:
                raise Unstorable(f"no row can hold what was asked for: {error.orig}") from error
            except DBAPIError as error:
                if attempt == 1 and error.connection_invalidated:
                    continue
                raise StoreUnavailable(f"the database cannot be read: {error.orig}") from error
        raise AssertionError("unreachable")
