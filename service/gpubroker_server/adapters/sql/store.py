"""The TaskStore on SQLite and PostgreSQL, with one thread that writes and a few that read."""

import asyncio
from asyncio import get_running_loop
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec.structs import asdict

from gpubroker_server.adapters.sql import reads, terms
from gpubroker_server.adapters.sql import statements as sql
from gpubroker_server.adapters.sql.database import Database, begin_lineage, migrate, open_database
from gpubroker_server.adapters.sql.group import Change, NewBatch, NewRequest, NewTask, Unit
from gpubroker_server.adapters.sql.idle_templates import SqlIdleTemplates
from gpubroker_server.adapters.sql.last_values import SqlLastValues
from gpubroker_server.adapters.sql.objects import SqlObjects
from gpubroker_server.adapters.sql.pruning import prune_step
from gpubroker_server.adapters.sql.reads import SqlItemPages, SqlReads
from gpubroker_server.adapters.sql.rows import token_row
from gpubroker_server.adapters.sql.run_logs import SqlRunLogs
from gpubroker_server.adapters.sql.run_outputs import SqlRunOutputs
from gpubroker_server.adapters.sql.session import DatabaseRefused, Noted, Readers, Session
from gpubroker_server.adapters.sql.writer import BeginAt, CatchUp, Work, Writer
from gpubroker_server.core.domain.decisions import Decision, Outcome, Request
from gpubroker_server.core.domain.leader_term import LeaderRow
from gpubroker_server.core.domain.orders import Failure
from gpubroker_server.core.domain.policy import HALF_LIFE_SECONDS, Cutoffs
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Lineage, Position, Seconds, TaskId, Term
from gpubroker_server.core.world.events import Event
from gpubroker_server.ports.store import (
    AdmittedTask,
    BatchSubmission,
    CommitVerdict,
    EventListener,
    RunSpec,
    StaleTerm,
    StoredResult,
    StoreUnavailable,
    SubmitOutcome,
    SubmitVerdict,
    TaskRecord,
    TokenRow,
    Unstorable,
)

__all__ = ["DatabaseRefused", "SqlStore", "begin_lineage", "migrate", "open_store"]

T = TypeVar("T")

EVENTS_PER_TURN = 500
"""The most events that one turn of the event loop delivers. Listeners block the loop for some milliseconds to
apply them."""
RECENT_BYTES = 32 * 2**20
"""The most memory that RecentTasks uses, in bytes."""
_ENTRY_BYTES = 2048
"""The memory of an entry without its arguments and its result, in bytes."""


async def open_store(
    url: str, *, usage_half_life_seconds: Seconds = HALF_LIFE_SECONDS, **options: Any
) -> "SqlStore":
    """Open the database at `sqlite:///path` or `postgresql://...`, after bringing its schema to the newest.

    A SQLite file is locked until `close`. On PostgreSQL any number of processes may open one database; one of
    them migrates at a time. The options are those of `open_database`. Raises DatabaseRefused.
    """
    database = await asyncio.to_thread(open_database, url, **options)
    try:
        return await asyncio.to_thread(SqlStore, database, usage_half_life_seconds)
    except BaseException:
        database.session.close()
        database.readers.dispose()
        database.release()
        raise


@dataclass(slots=True)
class _Entry:
    spec: RunSpec
    size_bytes: int
    ended: tuple[Task, Outcome] | None = None


class RecentTasks:
    """The specs and the ends of recently submitted tasks. The start of a task and a waiting client need them
    moments after they were written, and reading them back takes 0.6 ms of CPU time per task (`bench run`).
    The oldest entries are dropped first."""

    def __init__(self) -> None:
        self._entries: OrderedDict[TaskId, _Entry] = OrderedDict()
        self._size_bytes = 0

    def note_submission(self, submission: AdmittedTask) -> None:
        """Keep the spec of a submission. Called before the write, because the task may start before the write
        is answered."""
        spec = submission.spec
        entry = _Entry(spec, _ENTRY_BYTES + len(spec.arguments))
        if self._entries.setdefault(submission.task.id, entry) is entry:
            self._grow(entry.size_bytes)

    def forget(self, task: TaskId) -> None:
        """Drop a task that was not stored or has been pruned."""
        if (entry := self._entries.pop(task, None)) is not None:
            self._size_bytes -= entry.size_bytes

    def note_ends(self, units: Sequence[Unit]) -> None:
        """Keep the outcomes of committed decisions. Ends without an outcome are read from the database."""
        for unit in units:
            if isinstance(unit, Change) and unit.answer is CommitVerdict.COMMITTED:
                outcome = unit.decision.outcome
                for write in unit.decision.tasks:
                    entry = self._entries.get(write.task.id)
                    if entry and outcome and write.task.is_terminal and outcome.result_digest is None:
                        entry.ended = (write.task, outcome)
                        entry.size_bytes += len(outcome.result or b"") + len(outcome.log_tail)
                        self._grow(len(outcome.result or b"") + len(outcome.log_tail))

    def spec(self, task: TaskId) -> RunSpec | None:
        entry = self._entries.get(task)
        return None if entry is None else entry.spec

    def record(self, task: TaskId) -> TaskRecord | None:
        entry = self._entries.get(task)
        if entry is None or entry.ended is None:
            return None
        row, outcome = entry.ended
        return TaskRecord(row, entry.spec, _fields(outcome.failure))

    def result(self, task: TaskId) -> StoredResult | None:
        entry = self._entries.get(task)
        if entry is None or entry.ended is None:
            return None
        _, outcome = entry.ended
        failure = _fields(outcome.failure)
        return StoredResult(
            outcome.ending, outcome.result_format, outcome.result, None, failure, outcome.log_tail
        )

    def _grow(self, more_bytes: int) -> None:
        self._size_bytes += more_bytes
        while self._size_bytes > RECENT_BYTES:
            _, oldest = self._entries.popitem(last=False)
            self._size_bytes -= oldest.size_bytes


def _fields(failure: Failure | None) -> Mapping[str, Any] | None:
    return None if failure is None else asdict(failure)


class SqlStore(
    SqlReads, SqlLastValues, SqlObjects, SqlItemPages, SqlRunLogs, SqlRunOutputs, SqlIdleTemplates
):
    """Implements the port `TaskStore`. Writes go to the writer's thread and are answered after their commit;
    reads use the threads of the readers."""

    def __init__(
        self,
        database: Database,
        usage_half_life_seconds: Seconds = HALF_LIFE_SECONDS,
        *,
        readers: type[Readers] = Readers,
        writer: type[Writer] = Writer,
    ) -> None:
        self._database = database
        self._readers = readers(database.readers)
        self._begin_snapshot = database.begin_snapshot
        self._listeners: list[EventListener] = []
        self._fault: Exception | None = None
        """The exception that a listener raised. Nothing is written after it, because the World of this
        process no longer shows what is stored."""
        self._recent = RecentTasks()
        self._of_this_turn: list[Work] = []
        self.tokens_changed = asyncio.Event()
        """`catch_up` sets this event; the code that reads the tokens clears it."""
        self._token_changes = 0
        self.resigned = asyncio.Event()
        """`keep_hints` sets this event when a leader has resigned; the code that reads the leader's row
        clears it."""
        self._hints = None if database.hints is None else database.hints()
        connect = database.connect_term
        self._terms = None if connect is None else terms.TermConnection(connect)
        self._undelivered: deque[tuple[Sequence[Event], Sequence[Work]]] = deque()
        """Committed events that are not delivered to listeners yet, with the works that are answered after
        them."""
        heard, lineage = self._readers.query(reads.head), self._readers.query(reads.lineage)
        self._writer = writer(database.session, heard, lineage, self._deliver, usage_half_life_seconds)
        self._writer.start()

    def listen(self, listener: EventListener) -> None:
        self._listeners.append(listener)

    @property
    def is_shared(self) -> bool:
        """True if other processes may write to the database."""
        return self._database.is_shared

    @property
    def gives_hints(self) -> bool:
        """True if processes notify each other, so that `keep_hints` must run."""
        return self._hints is not None

    async def catch_up(self) -> bool:
        """Deliver to the listeners the events that other processes have appended. Returns True if more
        follow.

        Raises LogShortened if some of these events have been pruned, LineageChanged, and StoreUnavailable.
        """
        work = CatchUp(get_running_loop())
        self._hand_over(work)
        more, token_changes = await work.future
        if token_changes != self._token_changes:
            self._token_changes = token_changes
            self.tokens_changed.set()
        return bool(more)

    async def go_on_at(self, position: Position, lineage: Lineage) -> None:
        """Continue after this position. Listeners know everything up to it from a snapshot."""
        self._recent = RecentTasks()  # A database that was restored may lack some of these tasks.
        work = BeginAt(get_running_loop(), position, lineage)
        self._hand_over(work)
        await work.future

    async def keep_hints(self, on_hint: Callable[[], None]) -> None:
        """Notify other processes of commits, and receive their notifications, until cancelled."""
        if self._hints is not None:
            await self._hints.keep(on_hint, self.resigned.set)

    async def submit(self, submission: AdmittedTask) -> SubmitOutcome:
        self._recent.note_submission(submission)
        [answer] = await self._write([NewTask(submission)])
        if answer.verdict is not SubmitVerdict.ACCEPTED:
            self._recent.forget(submission.task.id)
        return answer  # type: ignore[no-any-return]  # what NewTask answers

    async def submit_batch(self, batch: BatchSubmission) -> SubmitOutcome:
        [answer] = await self._write([NewBatch(batch)])
        return answer  # type: ignore[no-any-return]  # what NewBatch answers

    async def request(self, *requests: Request) -> None:
        await self._write([NewRequest(request) for request in requests])

    async def commit(self, term: Term, decisions: Sequence[Decision]) -> Sequence[CommitVerdict]:
        # A decision that cannot be encoded is refused alone; the others are written.
        verdicts = [CommitVerdict.UNSTORABLE] * len(decisions)
        units: dict[int, Change] = {}
        for place, decision in enumerate(decisions):
            with suppress(Unstorable):
                units[place] = Change(term, decision)
        if units:
            for place, verdict in zip(units, await self._write(list(units.values())), strict=True):
                verdicts[place] = verdict
        return verdicts

    async def leader(self) -> LeaderRow:
        if self._terms is None:
            return await self._readers.run(reads.leader)
        return await self._terms.run(terms.read_leader)

    async def take_term(
        self, holder: str, ttl_seconds: Seconds, *, instead_of: LeaderRow, has_lost_commits: bool = False
    ) -> Term | None:
        act = terms.take_term(holder, ttl_seconds, instead_of, has_lost_commits=has_lost_commits)
        return await self._on_leader(act)

    async def renew(self, term: Term, ttl_seconds: Seconds) -> None:
        if not await self._on_leader(terms.renew_term(term, ttl_seconds)):
            leader = await self.leader()
            raise StaleTerm(f"term {term} is over: {leader.holder} leads term {leader.term}; stop leading")

    async def resign(self, term: Term) -> None:
        await self._on_leader(terms.resign_term(term))

    async def put_token(self, token: TokenRow, *, by: str) -> bool:
        def act(session: Session) -> Noted[bool]:
            if not session.fetch(sql.add_token, [token_row(token)]):
                # The name exists. The row is this token's if the answer to its commit was lost.
                return Noted(session.fetch(sql.token_hash, [(token.name,)]) == [(token.sha256,)])
            session.write(sql.count_token_change, [(1,)])
            return Noted(True, [(session.now(), token.tenant, by, "token.put", token.name, "")])

        return await self._write_noted(act)

    async def drop_token(self, name: str, *, by: str) -> bool:
        def act(session: Session) -> Noted[bool]:
            for _, tenant in session.fetch(sql.drop_token, [(name,)]):
                session.write(sql.count_token_change, [(1,)])
                return Noted(True, [(session.now(), tenant, by, "token.dropped", name, "")])
            return Noted(False)

        return await self._write_noted(act)

    async def claim_blobs(self, directory: str, *, instead_of: str) -> str:
        """Set the name of the directory of objects if the present one is `instead_of` (empty for none).
        Returns the name that is set after that."""

        def act(session: Session) -> str:
            [(first,)] = session.fetch(sql.claim_blobs, [(1, directory, instead_of)])
            return str(first)

        return await self._write_alone(act)

    async def audit(self, *, by: str, tenant: str, action: str, subject: str) -> None:
        def act(session: Session) -> Noted[None]:
            return Noted(None, [(session.now(), tenant, by, action, subject, "")])

        await self._write_noted(act)

    async def prune(self, term: Term, cutoffs: Cutoffs) -> bool:
        tasks = await self._write_alone(lambda session: prune_step(session, term, cutoffs))
        for task in tasks or ():
            self._recent.forget(task)
        return tasks is not None

    async def record(self, task: TaskId) -> TaskRecord | None:
        return self._recent.record(task) or await self.stored_record(task)

    async def specs(self, tasks: Sequence[TaskId]) -> Mapping[TaskId, RunSpec]:
        recent = {task: spec for task in tasks if (spec := self._recent.spec(task)) is not None}
        missing = [task for task in tasks if task not in recent]
        return {**recent, **await self.stored_specs(missing)} if missing else recent

    async def result(self, task: TaskId) -> StoredResult | None:
        return self._recent.result(task) or await self.stored_result(task)

    async def close(self) -> None:
        """Write everything that is waiting, then release the database."""
        self._wake_writer()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if self._terms is not None:
            self._terms.close()
        self._readers.close()
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
        """Queue the work. The writer is woken once for all works of one turn of the event loop."""
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
            return  # `close` has taken the works.
        try:
            self._writer.put(works)
        except StoreUnavailable as closed:
            for work in works:
                work.refuse(closed)

    def _deliver(self, events: Sequence[Event], works: Sequence[Work]) -> None:
        # The ends are noted before listeners hear of them: a waiting client asks for the result at once.
        for work in works:
            self._recent.note_ends(work.units)
        if self._hints is not None and any(not isinstance(work, CatchUp) for work in works):
            self._hints.send()
        self._undelivered.append((events, works))
        # If events wait already, a later turn delivers those first: listeners get all events in order.
        if len(self._undelivered) == 1:
            self._deliver_more()

    def _deliver_more(self) -> None:
        """Deliver events in pieces and in order, so that many events do not block the event loop."""
        events_left = EVENTS_PER_TURN
        while self._undelivered and events_left > 0:
            events, works = self._undelivered[0]
            self._hand_out(events[:events_left])
            if len(events) > events_left:
                self._undelivered[0] = (events[events_left:], works)
            else:
                self._undelivered.popleft()
                self._finish(works)
            events_left -= len(events)
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
