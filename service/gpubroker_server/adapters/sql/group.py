"""Units of work, and one transaction for many of them."""

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpubroker_server.adapters.sql import statements as sql
from gpubroker_server.adapters.sql.batch_rows import BatchRows
from gpubroker_server.adapters.sql.rows import (
    Written,
    estimate_row,
    event_row,
    home_text,
    row_of_request,
    rows_of_decision,
    rows_of_submission,
)
from gpubroker_server.adapters.sql.rowset import Row, Rows, SetStatement
from gpubroker_server.adapters.sql.session import (
    CommitUnknown,
    ConstraintFailed,
    GuardMissed,
    Session,
)
from gpubroker_server.core.domain.decisions import Decision, Request, device_delta_mb, tenant_delta_mb
from gpubroker_server.core.domain.estimates import Lesson, Topic
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Instant, Position, Seconds, TaskId, Term
from gpubroker_server.core.world.events import Event, NewEvent, events_of, requested, submitted
from gpubroker_server.core.world.tenant_accounts import decayed
from gpubroker_server.ports.store import (
    BatchSubmission,
    CommitVerdict,
    StoreUnavailable,
    Submission,
    SubmitOutcome,
    SubmitVerdict,
    Unstorable,
)


class Unit(ABC):
    """The smallest thing that is written whole or not at all.

    `answer` is what the caller gets: a value, or an exception to raise.
    """

    term: Term | None = None
    memory: Mapping[str, int] = {}
    """Device key -> change of its leased MiB."""
    finished: Sequence[tuple[str, TaskState]] = ()
    taken: Mapping[str, int] = {}
    """Tenant -> change of what it holds."""
    lessons: Sequence[Lesson] = ()
    weight = 1
    """How many such make a group as large as it should be."""

    def __init__(self, rows: Sequence[Written], events: Sequence[NewEvent]) -> None:
        self._fill(rows, events)
        self.answer: Any = None

    def _fill(self, rows: Sequence[Written], events: Sequence[NewEvent]) -> None:
        self._written = rows
        self._events = events
        self._event_rows = [event_row(event) for event in events]

    def make_ready(self) -> None:  # noqa: B027  # most are when they are made
        """What would hold up the caller's thread; called by the writer's, before its transaction."""

    @property
    def event_count(self) -> int:
        return len(self._events)

    def put_rows(self, rows: Mapping[SetStatement, Rows]) -> None:
        """Add its own, events apart."""
        for statement, row in self._written:
            rows[statement].single.append(row)

    def put_events(self, rows: Rows, first: Position, at: Instant) -> None:
        """Add its events, from this position on."""
        rows.single += ((position, at, *row) for position, row in enumerate(self._event_rows, first))

    def events_at(self, first: Position, at: Instant) -> Iterator[Event]:
        """The same as others hear of them."""
        return (event.at(Position(position), at) for position, event in enumerate(self._events, first))

    @abstractmethod
    def on_written(self) -> None:
        """It is in the database."""

    def on_failed(self, error: Exception) -> None:
        """Nothing of it was written, and this is its own error or one that holds for everybody."""
        self.answer = error


class Arrival(Unit):
    """Tasks on their way in, known again by the id of the first of them and by their key."""

    home: str | None = None
    """Of a model: there is one holder of it at a time."""

    def __init__(self, first: TaskId, tenant: str, key: str | None, body_hash: str) -> None:
        super().__init__((), ())
        self.first = first
        self.key = (tenant, key)
        self._body_hash = body_hash

    def on_written(self) -> None:
        self.answer = SubmitOutcome(SubmitVerdict.ACCEPTED, self.first)

    def on_there(self, task: TaskId) -> None:
        """That one is the holder of its home."""
        self.answer = SubmitOutcome(SubmitVerdict.DUPLICATE, task)

    def on_known(self, task: TaskId, body_hash: str | None) -> None:
        """Something with this key was there before."""
        if body_hash != self._body_hash:
            self.answer = SubmitOutcome(SubmitVerdict.KEY_REUSED, task)
        elif task != self.first:
            self.answer = SubmitOutcome(SubmitVerdict.DUPLICATE, task)
        else:
            self.on_written()


class NewTask(Arrival):
    def __init__(self, submission: Submission) -> None:
        task = submission.task
        super().__init__(task.id, task.tenant, submission.idempotency_key, submission.body_hash)
        self.home = home_text(task)
        self._fill(list(rows_of_submission(submission)), [submitted(task)])


class NewBatch(Arrival):
    def __init__(self, batch: BatchSubmission) -> None:
        super().__init__(batch.first, batch.tenant, batch.idempotency_key, batch.body_hash)
        self._batch = batch
        self._made: BatchRows | None = None
        self.weight = max(1, len(batch.submissions) // 8)  # of many alike each costs so much less

    def make_ready(self) -> None:
        self._made = self._made or BatchRows(self._batch)

    @property
    def _rows(self) -> BatchRows:
        assert self._made is not None, "it was not made ready"
        return self._made

    @property
    def event_count(self) -> int:
        return len(self._rows)

    def put_rows(self, rows: Mapping[SetStatement, Rows]) -> None:
        for statement, alike in self._rows.blocks:
            rows[statement].alike.append(alike)

    def put_events(self, rows: Rows, first: Position, at: Instant) -> None:
        rows.alike.append(self._rows.event_rows(first, at))

    def events_at(self, first: Position, at: Instant) -> Iterator[Event]:
        return self._rows.events(first, at)


class NewRequest(Unit):
    def __init__(self, request: Request) -> None:
        super().__init__([row_of_request(request)], [requested(request)])

    def on_written(self) -> None:
        self.answer = None

    def on_failed(self, error: Exception) -> None:
        stored_before = isinstance(error, GuardMissed)
        self.answer = None if stored_before else error


class Change(Unit):
    def __init__(self, term: Term, decision: Decision) -> None:
        super().__init__(list(rows_of_decision(decision)), list(events_of(decision)))
        self.decision = decision
        self.term = term
        self.memory = device_delta_mb(decision)
        self.taken = tenant_delta_mb(decision)
        self.lessons = decision.lessons
        self.finished = [(w.task.tenant, w.task.state) for w in decision.tasks if w.task.is_terminal]

    def on_written(self) -> None:
        self.answer = CommitVerdict.COMMITTED

    def on_failed(self, error: Exception) -> None:
        match error:
            case GuardMissed(statement=sql.LEASE_MEMORY) | ConstraintFailed():
                self.answer = CommitVerdict.REFUSED
            case GuardMissed():
                self.answer = CommitVerdict.STALE
            case Unstorable():
                self.answer = CommitVerdict.UNSTORABLE
            case StoreUnavailable():
                self.answer = CommitVerdict.UNAVAILABLE
            case _:
                self.answer = error


def write_group(session: Session, units: Sequence[Unit], half_life_seconds: Seconds) -> list[Event]:
    """Write all units in one transaction, or none. The events as committed, in order.

    Raises what the session raises. CommitUnknown carries the events to look for.
    """
    for unit in units:
        unit.make_ready()
    rows = _rows_by_statement(units)
    session.begin()
    for term in {unit.term for unit in units if unit.term is not None}:
        session.require_term(term)
    taken = _taken_by_tenant(units)
    # Before the first guard, so that what is waited for here is no other statement's fault.
    used = session.ask(sql.USAGE_OF, [(tenant,) for tenant in taken]) if taken else tuple
    for statement in sql.IN_ORDER:
        if statement in rows:
            session.write(statement, rows[statement])
    first, at = session.number(sum(unit.event_count for unit in units))
    if taken:
        session.write(sql.WRITE_USAGE, _usage_rows(taken, used(), at, half_life_seconds))
    numbered = _event_rows(units, first, at)
    if numbered:
        session.write(sql.INSERT_EVENTS, numbered)
    try:
        session.commit()
    except CommitUnknown as unknown:
        unknown.events = _events(units, first, at)
        raise
    return _events(units, first, at)


def _event_rows(units: Sequence[Unit], first: Position, at: Instant) -> Rows:
    rows = Rows()
    for unit in units:
        unit.put_events(rows, Position(first + len(rows)), at)
    return rows


def _events(units: Sequence[Unit], first: Position, at: Instant) -> list[Event]:
    """As committed. Made when nobody waits for the head of the log any more."""
    events: list[Event] = []
    for unit in units:
        events += unit.events_at(Position(first + len(events)), at)
    return events


def _taken_by_tenant(units: Sequence[Unit]) -> Mapping[str, int]:
    taken: dict[str, int] = {}
    for unit in units:
        for tenant, mb in unit.taken.items():
            taken[tenant] = taken.get(tenant, 0) + mb
    return taken


def _usage_rows(
    taken: Mapping[str, int], used: Sequence[Sequence[Any]], at: Instant, half_life_seconds: Seconds
) -> list[Row]:
    """The very sums that a World makes of the events of this group, which all bear this time."""
    known = {tenant: (held, mb_seconds, since) for tenant, held, mb_seconds, since in used}
    rows: list[Row] = []
    for tenant in sorted(taken):
        held, mb_seconds, since = known.get(tenant, (0, 0.0, at))
        by_now = decayed(mb_seconds, held, at - since, half_life_seconds)
        rows.append((tenant, held + taken[tenant], by_now, max(since, at)))
    return rows


def _rows_by_statement(units: Sequence[Unit]) -> Mapping[SetStatement, Rows]:
    rows: dict[SetStatement, Rows] = defaultdict(Rows)
    memory: Counter[str] = Counter()
    finished: Counter[tuple[str, TaskState]] = Counter()
    lessons: dict[Topic, Lesson] = {}
    for unit in units:
        unit.put_rows(rows)
        memory.update(unit.memory)
        finished.update(unit.finished)
        lessons.update((lesson.topic, lesson) for lesson in unit.lessons)
    if memory:
        rows[sql.LEASE_MEMORY] = Rows(sorted(memory.items()))
    if finished:
        counts = sorted(finished.items())
        rows[sql.COUNT_FINISHED] = Rows([(tenant, state.value, n) for (tenant, state), n in counts])
    if lessons:
        rows[sql.WRITE_ESTIMATES] = Rows([estimate_row(lesson) for lesson in lessons.values()])
    return rows


def answer_known(session: Session, units: Sequence[Unit]) -> list[Unit]:
    """Answer the submissions that were stored before; the units that remain to be written."""
    arrivals = [unit for unit in units if isinstance(unit, Arrival)]
    if not arrivals:
        return list(units)
    keys = [arrival.key for arrival in arrivals if arrival.key[1] is not None]
    by_key = {(row[0], row[1]): (row[2], row[3]) for row in session.fetch(sql.KNOWN_KEYS, keys)}
    ids = {row[0] for row in session.fetch(sql.KNOWN_IDS, [(arrival.first,) for arrival in arrivals])}
    homes = [(arrival.home,) for arrival in arrivals if arrival.home is not None]
    by_home = {row[0]: row[1] for row in session.fetch(sql.KNOWN_HOMES, homes)} if homes else {}
    left: list[Unit] = []
    for unit in units:
        if isinstance(unit, Arrival) and unit.key in by_key:
            unit.on_known(*by_key[unit.key])
        elif isinstance(unit, Arrival) and unit.first in ids:
            unit.on_written()
        elif isinstance(unit, Arrival) and unit.home in by_home:
            unit.on_there(by_home[unit.home])
        else:
            left.append(unit)
    return left
