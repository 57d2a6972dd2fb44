"""Units of work, and the group commit, which writes many units in one transaction."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpubroker_server.adapters.sql import statements as sql
from gpubroker_server.adapters.sql.rows import (
    BatchRows,
    Written,
    estimate_row,
    event_row,
    home_text,
    row_of_request,
    rows_of_decision,
    rows_of_submission,
)
from gpubroker_server.adapters.sql.session import (
    CommitUnknown,
    ConstraintFailed,
    Found,
    GuardMissed,
    Row,
    Rows,
    Session,
    SetStatement,
)
from gpubroker_server.core.domain.decisions import Decision, Request, device_delta_mb, tenant_delta_mb
from gpubroker_server.core.domain.estimates import Observation, SketchKey
from gpubroker_server.core.domain.holders import Model
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Instant, Position, Seconds, TaskId, Term
from gpubroker_server.core.world.events import Event, NewEvent, events_of, requested, submitted
from gpubroker_server.core.world.tenant_accounts import decayed
from gpubroker_server.ports.store import (
    AdmittedTask,
    BatchSubmission,
    CommitVerdict,
    StoreUnavailable,
    SubmitOutcome,
    SubmitVerdict,
    Unstorable,
)


class Unit(ABC):
    """The smallest thing that is written whole or not at all.

    `answer` is the value that the caller gets, or the exception that is raised.
    """

    term: Term | None = None
    """The term under which the unit may be written; None if any process may write it."""
    memory: Mapping[str, int] = {}
    """Device key -> the change of its leased memory in MiB."""
    finished: Sequence[tuple[str, TaskState]] = ()
    """(tenant, state) of each task that ends."""
    taken: Mapping[str, int] = {}
    """Tenant -> the change of the memory that it holds in MiB."""
    lessons: Sequence[Observation] = ()
    weight = 1
    """The part of a group's size that the unit takes."""

    def __init__(self, rows: Sequence[Written], events: Sequence[NewEvent]) -> None:
        self._written = rows
        self._events = events
        self._event_rows = [event_row(event) for event in events]
        self.answer: Any = None

    def prepare(self) -> None:  # noqa: B027  # most have nothing to prepare
        """Do what would block the event loop. The writer's thread calls this before its transaction."""

    @property
    def event_count(self) -> int:
        return len(self._events)

    def put_rows(self, rows: Mapping[SetStatement, Rows]) -> None:
        """Add the unit's rows, without its events."""
        for statement, row in self._written:
            rows[statement].single.append(row)

    def put_events(self, rows: Rows, first: Position, at: Instant) -> None:
        """Add the rows of the unit's events. `first` is the position of the first event."""
        rows.single += [(position, *row, at) for position, row in enumerate(self._event_rows, first)]

    def events_at(self, first: Position, at: Instant) -> Iterator[Event]:
        """Return the unit's events. `first` is the position of the first event."""
        return (event.at(Position(position), at) for position, event in enumerate(self._events, first))

    @abstractmethod
    def on_written(self) -> None:
        """Set the answer of a unit that is committed."""

    def on_failed(self, error: Exception) -> None:
        """Set the answer of a unit of which nothing was written because of the error."""
        self.answer = error


class NewTasks(Unit):
    """A submission. A repeated submission is recognized by the id of its first task or by its idempotency
    key."""

    home: str | None = None
    """The home of the model that the task holds. A home has one holder at a time."""

    def __init__(
        self,
        first: TaskId,
        tenant: str,
        key: str | None,
        body_hash: str,
        rows: Sequence[Written],
        events: Sequence[NewEvent],
    ) -> None:
        super().__init__(rows, events)
        self.first = first
        self.key = (tenant, key)
        self._body_hash = body_hash

    def on_written(self) -> None:
        self.answer = SubmitOutcome(SubmitVerdict.ACCEPTED, self.first)

    def on_home_taken(self, task: TaskId) -> None:
        """Set the answer for a model that already has a holder, which is `task`."""
        self.answer = SubmitOutcome(SubmitVerdict.DUPLICATE, task)

    def on_key_known(self, task: TaskId, body_hash: str | None) -> None:
        """Set the answer for an idempotency key that already belongs to `task`."""
        if body_hash != self._body_hash:
            self.answer = SubmitOutcome(SubmitVerdict.KEY_REUSED, task)
        elif task != self.first:
            self.answer = SubmitOutcome(SubmitVerdict.DUPLICATE, task)
        else:
            # An earlier try of this very submission was committed, and its answer was lost.
            self.on_written()


class NewTask(NewTasks):
    def __init__(self, submission: AdmittedTask) -> None:
        task, rows = submission.task, list(rows_of_submission(submission))
        about = task.id, task.tenant, submission.idempotency_key, submission.body_hash
        super().__init__(*about, rows, [submitted(task)])
        match task.holder:
            case Model() as model:
                self.home = home_text(model)
            case _:
                self.home = None


class NewBatch(NewTasks):
    def __init__(self, batch: BatchSubmission) -> None:
        rows = [row_of_request(request) for request in batch.requests]
        about = batch.first, batch.tenant, batch.idempotency_key, batch.body_hash
        super().__init__(*about, rows, [requested(request) for request in batch.requests])
        self._batch = batch
        self._made: BatchRows | None = None
        # Tasks of a batch share most of their rows, so each costs a fraction of a task that comes alone.
        self.weight = max(1, len(batch.submissions) // 8)

    def prepare(self) -> None:
        self._made = self._made or BatchRows(self._batch)

    @property
    def _rows(self) -> BatchRows:
        assert self._made is not None, "not prepared"
        return self._made

    @property
    def event_count(self) -> int:
        return len(self._rows) + super().event_count

    def put_rows(self, rows: Mapping[SetStatement, Rows]) -> None:
        for statement, block in self._rows.blocks:
            rows[statement].alike.append(block)
        super().put_rows(rows)

    def put_events(self, rows: Rows, first: Position, at: Instant) -> None:
        rows.alike.append(self._rows.event_rows(first, at))
        super().put_events(rows, self._behind(first), at)

    def events_at(self, first: Position, at: Instant) -> Iterator[Event]:
        yield from self._rows.events(first, at)
        yield from super().events_at(self._behind(first), at)

    def _behind(self, first: Position) -> Position:
        return Position(first + len(self._rows))


class NewRequest(Unit):
    def __init__(self, request: Request) -> None:
        super().__init__([row_of_request(request)], [requested(request)])

    def on_written(self) -> None:
        self.answer = None

    def on_failed(self, error: Exception) -> None:
        # The only guard is the request's id: a row that was not inserted is stored from an earlier try.
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
        ended = (w.task for w in decision.tasks if w.task.is_terminal)
        self.finished = [(task.tenant, task.state) for task in ended if not isinstance(task.holder, Model)]

    def on_written(self) -> None:
        self.answer = CommitVerdict.COMMITTED

    def on_failed(self, error: Exception) -> None:
        match error:
            # The plan is wrong and not just old: only a device without a row misses `lease_memory`.
            case GuardMissed(statement=sql.lease_memory) | ConstraintFailed():
                self.answer = CommitVerdict.REFUSED
            case GuardMissed():
                self.answer = CommitVerdict.STALE
            case Unstorable():
                self.answer = CommitVerdict.UNSTORABLE
            case StoreUnavailable():
                self.answer = CommitVerdict.UNAVAILABLE
            case _:
                self.answer = error


def write_group(
    session: Session, units: Sequence[Unit], half_life_seconds: Seconds, heard: Position
) -> list[Event]:
    """Write all units in one transaction, or none, and return their events in order. `heard` is the position
    up to which this process has read the log.

    Raises what the session raises. A CommitUnknown carries the events and the notes of the audit log.
    """
    for unit in units:
        unit.prepare()
    rows = _rows_by_statement(units)
    session.begin()
    for term in {unit.term for unit in units if unit.term is not None}:
        session.require_term(term)
    taken = _taken_by_tenant(units)
    # The query is sent before the first guard, so that its errors are not blamed on another statement. Only
    # the leader writes usage, and its term is locked, so the sums hold until the commit.
    used = session.fetch_later(sql.usage_of, [(tenant,) for tenant in taken]) if taken else tuple
    for statement in sql.IN_ORDER:
        if statement in rows:
            session.write(statement, rows[statement])
    # The positions are taken as late as possible: until this commit every other writer waits for the head of
    # the log, which makes the order of positions the order of commits. The rest needs positions or the time.
    first, at = session.take_positions(sum(unit.event_count for unit in units))
    if first <= heard:
        raise StoreUnavailable(
            f"the log was read up to position {heard} and is at {first - 1}: the database was restored; "
            "nothing is written until everything was read again"
        )
    if taken:
        session.write(sql.WRITE_USAGE, _usage_rows(taken, used(), at, half_life_seconds))
    numbered = _event_rows(units, first, at)
    if numbered:
        session.write(sql.INSERT_EVENTS, numbered)
    try:
        session.commit()
    except CommitUnknown as unknown:
        unknown.events = _events(units, first, at)
        unknown.notes = list(rows.get(sql.INSERT_AUDIT, ()))
        raise
    return _events(units, first, at)


def _event_rows(units: Sequence[Unit], first: Position, at: Instant) -> Rows:
    rows = Rows()
    for unit in units:
        unit.put_events(rows, Position(first + len(rows)), at)
    return rows


def _events(units: Sequence[Unit], first: Position, at: Instant) -> list[Event]:
    """Return the events of the units. Called after the commit, so that the head of the log is not locked
    while the events are made."""
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


def _usage_rows(taken: Mapping[str, int], used: Found, at: Instant, half_life_seconds: Seconds) -> list[Row]:
    """Return rows with the usage sums that a World computes from the events of this group, which all have the
    time `at`."""
    stored = {tenant: (held, mb_seconds, since) for tenant, held, mb_seconds, since in used}
    rows: list[Row] = []
    for tenant in sorted(taken):
        held, mb_seconds, since = stored.get(tenant, (0, 0.0, at))
        by_now = decayed(mb_seconds, held, at - since, half_life_seconds)
        # The database's clock may have been set back: the time of a sum never goes back.
        rows.append((tenant, held + taken[tenant], by_now, max(since, at)))
    return rows


def _rows_by_statement(units: Sequence[Unit]) -> Mapping[SetStatement, Rows]:
    rows: dict[SetStatement, Rows] = defaultdict(Rows)
    memory: dict[str, int] = defaultdict(int)
    finished: dict[tuple[str, TaskState], int] = defaultdict(int)
    lessons: dict[SketchKey, Observation] = {}
    for unit in units:
        unit.put_rows(rows)
        for device, mb in unit.memory.items():
            memory[device] += mb
        for ended in unit.finished:
            finished[ended] += 1
        # The sketch of a later lesson includes the earlier ones of its topic, so the last one is written.
        lessons.update((lesson.topic, lesson) for lesson in unit.lessons)
    if memory:
        rows[sql.lease_memory] = Rows(sorted(memory.items()))
    if finished:
        counts = sorted(finished.items())
        rows[sql.count_finished] = Rows([(tenant, state.value, n) for (tenant, state), n in counts])
    if lessons:
        rows[sql.WRITE_ESTIMATES] = Rows([estimate_row(lesson) for lesson in lessons.values()])
    return rows


def answer_known(session: Session, units: Sequence[Unit]) -> list[Unit]:
    """Answer the submissions that are stored already. Returns the units that remain to be written."""
    submitted_units = [unit for unit in units if isinstance(unit, NewTasks)]
    if not submitted_units:
        return list(units)
    keys = [new.key for new in submitted_units if new.key[1] is not None]
    by_key = {(row[0], row[1]): (row[2], row[3]) for row in session.fetch(sql.known_keys, keys)}
    ids = {row[0] for row in session.fetch(sql.known_ids, [(new.first,) for new in submitted_units])}
    models = [(new.home,) for new in submitted_units if new.home is not None]
    by_home = {row[0]: row[1] for row in session.fetch(sql.known_homes, models)} if models else {}
    unanswered: list[Unit] = []
    for unit in units:
        if isinstance(unit, NewTasks) and unit.key in by_key:
            unit.on_key_known(*by_key[unit.key])
        elif isinstance(unit, NewTasks) and unit.first in ids:
            unit.on_written()
        elif isinstance(unit, NewTasks) and unit.home in by_home:
            unit.on_home_taken(by_home[unit.home])
        else:
            unanswered.append(unit)
    return unanswered
