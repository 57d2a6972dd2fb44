"""The one thread that writes. The thread takes all works that wait, writes them in one transaction, and then
answers them.

The thread also reads the tail of the log, so that events of this and of other processes come in one order.
"""

import threading
from asyncio import AbstractEventLoop, Future
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from gpubroker_server.adapters.sql import statements as sql
from gpubroker_server.adapters.sql.group import Unit, answer_known, write_group
from gpubroker_server.adapters.sql.rows import event_of_row
from gpubroker_server.adapters.sql.session import (
    CLOSED,
    Collided,
    CommitUnknown,
    ConnectionLost,
    Found,
    Noted,
    Row,
    Session,
)
from gpubroker_server.adapters.sql.system_tables import check_schema
from gpubroker_server.core.domain.units import Lineage, Position, Seconds
from gpubroker_server.core.world.events import Event
from gpubroker_server.ports.store import LineageChanged, LogShortened, Outgrown, StoreUnavailable

_UNITS_PER_GROUP = 512
"""The weight from which a group takes no more works."""
_EVENTS_PER_CATCH_UP = 1000
"""The most events that are read at once. Applying an event blocks the event loop for some tens of
microseconds."""
_TRIES = 3
_RETRY_SECONDS = 0.25
"""The pause before a database that does not answer is asked again."""
_BROKEN_OFF = f"the connection to the database broke in {_TRIES} tries; nothing was written"
_BACKOFF_SECONDS = 0.05
"""Pause before a transaction that collided with another is repeated."""
_IDLE_SECONDS = 2.0
"""Time without works after which the session does its upkeep."""

T = TypeVar("T")

Deliver = Callable[[Sequence[Event], Sequence["Work"]], None]
"""Function that hands the events to the listeners, and then answers the works. It runs on the event loop."""


class Work:
    """The work that one caller waits for: units to write, or an act with its own transaction."""

    def __init__(
        self,
        loop: AbstractEventLoop,
        units: Sequence[Unit] = (),
        alone: Callable[[Session], Any] | None = None,
    ) -> None:
        self.units = units
        self.alone = alone
        self.answer: Any = None
        self.future: Future[Any] = loop.create_future()

    @property
    def weight(self) -> int:
        return sum(unit.weight for unit in self.units)

    def refuse(self, error: Exception) -> None:
        """Answer the caller with an error. Call this on the event loop."""
        if not self.future.done():
            self.future.set_exception(error)

    def finish(self) -> None:
        """Answer the caller. Call this on the event loop."""
        if self.future.cancelled():
            return
        answers = [unit.answer for unit in self.units] if self.units else [self.answer]
        error = next((answer for answer in answers if isinstance(answer, Exception)), None)
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(answers if self.units else self.answer)


class CatchUp(Work):
    """Reads the events that other processes have appended. The answer says whether more events follow, and
    how often tokens have changed."""


class BeginAt(Work):
    """Continues the log at the position of a snapshot."""

    def __init__(self, loop: AbstractEventLoop, position: Position, lineage: Lineage) -> None:
        super().__init__(loop)
        self.position = position
        self.lineage = lineage


class Writer:
    """Owns the session from `start` to `close`. `put` never blocks, so it may be called on the event loop."""

    def __init__(
        self,
        session: Session,
        heard: Position,
        lineage: Lineage,
        deliver: Deliver,
        usage_half_life_seconds: Seconds,
    ) -> None:
        self._session = session
        self._usage_half_life_seconds = usage_half_life_seconds
        self._heard = heard
        self._history = lineage, session.server
        """The lineage and the server of the log that was read up to `_heard`."""
        self._deliver = deliver
        self._inbox: SimpleQueue[Sequence[Work] | None] = SimpleQueue()
        self._closing = threading.Event()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpubroker-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, works: Sequence[Work]) -> None:
        """Give works to the writer. Raises StoreUnavailable after `close`."""
        if self._closing.is_set():
            raise StoreUnavailable(CLOSED)
        self._inbox.put(works)
        if self._has_ended.is_set():
            # `close` came between the check and the queue, and the thread takes nothing any more.
            self._refuse_waiting(CLOSED)

    def close(self) -> None:
        """Write everything that is waiting, then end the thread. Blocks until the thread has ended."""
        self._closing.set()
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (first := self._next()) is not None:
            self.carry_out(self._with_waiting(first))
        # The order matters: if `put` queues works after the last look, it finds that the thread has ended.
        self._has_ended.set()
        self._refuse_waiting(CLOSED)
        self._session.close()

    def carry_out(self, works: Sequence[Work]) -> None:
        """Write all units in one transaction, then do the other works one by one. All works are answered."""
        group = [work for work in works if work.units]
        events = self._write([unit for work in group for unit in work.units])
        self.answer(events, group)
        for work in works:
            if not work.units:
                self.answer(self._do(work), [work])

    def _next(self) -> Sequence[Work] | None:
        """Return the next works, or None at the end. If none come for a while, the session does its upkeep
        once."""
        with suppress(Empty):
            return self._inbox.get(timeout=_IDLE_SECONDS)
        self._session.on_idle()
        return self._inbox.get()

    def _do(self, work: Work) -> Sequence[Event]:
        """Do a work without units. Returns the events that the work has read."""
        match work:
            case CatchUp():
                return self._catch_up(work)
            case BeginAt():
                self._heard = work.position
                self._history = work.lineage, self._session.server
            case Work(alone=act) if act is not None:
                work.answer = self._run_alone(act)
        return ()

    def _with_waiting(self, first: Sequence[Work]) -> list[Work]:
        works = list(first)
        while sum(work.weight for work in works) < _UNITS_PER_GROUP:
            more = self._next_waiting()
            if not more:
                break
            works += more
        return works

    def _next_waiting(self) -> Sequence[Work]:
        try:
            works = self._inbox.get_nowait()
        except Empty:
            return ()
        if works is None:
            self._inbox.put(None)  # `_run` has to see the end as well.
        return works or ()

    def answer(self, events: Sequence[Event], works: Sequence[Work]) -> None:
        """Have the event loop deliver the events, and answer the works."""
        if works:
            with suppress(RuntimeError):  # A closed event loop raises it, and nobody waits on that loop.
                works[0].future.get_loop().call_soon_threadsafe(self._deliver, events, works)

    def _write(self, units: Sequence[Unit]) -> list[Event]:
        """Write units, together if possible, and set the answer of each."""
        events: list[Event] = []
        groups: deque[Sequence[Unit]] = deque([units] if units else [])
        while groups:
            group = groups.popleft()
            try:
                written = self._transact(partial(self._write_group, group), self._read_back)
            except StoreUnavailable as error:
                # Later groups would fail in the same way, each after all its tries.
                for unit in (*group, *(unit for later in groups for unit in later)):
                    unit.on_failed(error)
                break
            except Exception as error:
                # The parts take the place of their group, so that units keep their order.
                groups.extendleft(reversed(self._parts(group, error)))
            else:
                for unit in group:
                    unit.on_written()
                events += self._without_gap(written)
        return events

    def _without_gap(self, events: list[Event]) -> list[Event]:
        """Return the events, and the events of other processes in between, so that listeners get every
        position once. No caller is answered before the events of its commit can be delivered: the leader
        would repeat decisions that its World does not show yet."""
        if not events or self._session.server != self._history[1]:
            return []  # The next catch-up finds that this is another server.
        if events[0].position != self._heard + 1:
            span = (self._heard, events[-1].position)
            tail_rows = self._insist(lambda: self._session.fetch(sql.tail, [(1, *span)]))
            try:
                events = _readable([row[4:] for row in tail_rows or ()])
            except Outgrown:
                return []  # The next catch-up raises it.
            if len(events) < span[1] - span[0] and self._insist(self._is_shortened):
                return []  # The next catch-up raises LogShortened.
        if events:
            self._heard = events[-1].position
        return events

    def _catch_up(self, work: CatchUp) -> Sequence[Event]:
        """Return the next events of other processes."""
        try:
            most = self._heard + _EVENTS_PER_CATCH_UP
            tail_rows = self._session.fetch(sql.tail, [(1, self._heard, most)])
            head, token_changes, compatible_from, lineage = tail_rows[0][:4]
            check_schema(compatible_from)
            self._check_history(head, lineage)
            last = min(head, most)
            rows = [row[4:] for row in tail_rows if row[4] is not None]
            # The log has no gaps: a position without an event was pruned.
            if len(rows) < last - self._heard and self._is_shortened():
                raise LogShortened(
                    f"the log no longer holds all events after position {self._heard}; take a new snapshot"
                )
            events = _readable(rows)
        except Outgrown as error:
            work.answer = error
            return ()
        except (ConnectionLost, StoreUnavailable) as error:
            work.answer = StoreUnavailable(str(error))
            with suppress(StoreUnavailable):
                self._session.reconnect()
            return ()
        except Exception as error:
            work.answer = error
            return ()
        if len(events) < len(rows):
            # The next event is of a newer form: the next catch-up begins there, and raises LogOutgrown.
            last = events[-1].position
        self._heard = Position(max(last, self._heard))
        work.answer = last < head, token_changes
        return events

    def _check_history(self, head: Position, lineage: Lineage) -> None:
        """Check that the log continues where this process has read to. Raises LineageChanged."""
        current = lineage, self._session.server
        if current == self._history and head >= self._heard:
            return
        of = "lineage {}" + (" on server {}" if current[1] else "")
        fault = LineageChanged(
            f"the log was read up to position {self._heard} in {of.format(*self._history)}, and is at {head} "
            f"in {of.format(*current)}: the database was restored, or another server took over; reading "
            "everything again"
        )
        # If the head went back within one lineage, commits were lost and no lineage has begun since.
        fault.has_lost_commits = current == self._history
        raise fault

    def _is_shortened(self) -> bool:
        """Return True if the next event has been pruned. Raises what the session raises."""
        [(oldest,)] = self._session.fetch(sql.oldest, [(1,)])
        return bool(oldest > self._heard + 1)

    def _parts(self, group: Sequence[Unit], error: Exception) -> list[Sequence[Unit]]:
        """Return the groups that are left to write after a group has failed. If some units are stored
        already, the others form one group. Otherwise each unit is written alone, so that one unit does not
        fail the others."""
        try:
            unanswered = answer_known(self._session, group)
        except ConnectionLost:
            return [group]
        except Exception as failed:
            if len(group) > 1:
                return [[unit] for unit in group]
            group[0].on_failed(failed)
            return []
        if len(unanswered) < len(group):
            return [unanswered] if unanswered else []
        if len(group) > 1:
            return [[unit] for unit in group]
        group[0].on_failed(error)
        return []

    def _transact(self, act: Callable[[], T], recover: Callable[[CommitUnknown], T | None]) -> T:
        """Run one transaction, and repeat it after errors of the connection and after collisions. `recover`
        returns the result of an unknown commit that succeeded, or None if `act` must be repeated."""
        for _ in range(_TRIES):
            try:
                return act()
            except ConnectionLost:
                self._session.reconnect()
            except CommitUnknown as unknown:
                if (done := recover(unknown)) is not None:
                    return done
            except Collided:
                self._session.rollback()
                self._closing.wait(_BACKOFF_SECONDS)
            except Exception:
                self._session.rollback()
                raise
        raise StoreUnavailable(_BROKEN_OFF)

    def _write_group(self, units: Sequence[Unit]) -> list[Event]:
        return write_group(self._session, units, self._usage_half_life_seconds, self._heard)

    def _read_back(self, unknown: CommitUnknown) -> list[Event] | None:
        # A commit writes all or nothing, so its first event stands for all, or its first note if it has none.
        if unknown.events:
            is_done = self._was_committed(partial(self._session.has_event, unknown.events[0]))
        elif unknown.notes:
            is_done = self._was_committed(partial(self._has_note, unknown.notes[0]))
        else:
            # Nothing shows whether the commit succeeded. A repetition writes nothing twice: rows have keys.
            self._session.reconnect()
            is_done = False
        return list(unknown.events) if is_done else None

    def _has_note(self, note: Row) -> bool:
        """Return True if the audit log has this note. Waits for a commit that is under way."""
        self._session.begin()
        self._session.take_positions(0)
        notes = self._session.fetch(sql.noted, [note])
        self._session.rollback()
        return bool(notes)

    def _was_committed(self, has_first: Callable[[], bool]) -> bool:
        """Return True if the database has the first row of an unknown commit. Asks until the database
        answers, because a caller gets no answer before the outcome is known. Raises StoreUnavailable if the
        store is closed."""
        with suppress(StoreUnavailable):
            self._session.reconnect()
        is_committed = self._insist(has_first)
        if is_committed is None:
            raise StoreUnavailable("the store was closed before an unknown commit could be read back")
        return is_committed

    def _insist(self, ask: Callable[[], T]) -> T | None:
        """Call `ask` until the database answers, and refuse all other works meanwhile. Returns None if the
        store is closed."""
        while True:
            try:
                return ask()
            except (ConnectionLost, StoreUnavailable) as error:
                self._refuse_waiting(str(error))
                if self._closing.wait(_RETRY_SECONDS):
                    return None
                with suppress(StoreUnavailable):
                    self._session.reconnect()

    def _refuse_waiting(self, why: str) -> None:
        refused: list[Work] = []
        while works := self._next_waiting():
            for work in works:
                work.answer = StoreUnavailable(why)
                for unit in work.units:
                    unit.on_failed(work.answer)
            refused += works
        self.answer((), refused)

    def _run_alone(self, act: Callable[[Session], Any]) -> Any:
        """Run `act` in a transaction of its own. After an unknown commit an act is repeated, which writes
        nothing twice, unless the audit log has its note: a second note would tell of a second act."""
        notes: Sequence[Row] = ()
        answer: Any = None

        def transaction() -> Any:
            nonlocal answer, notes
            self._session.begin()
            answer = act(self._session)
            notes = answer.rows if isinstance(answer, Noted) else ()
            if notes:
                self._session.write(sql.INSERT_AUDIT, notes)
            # Every writing transaction takes the head of the log, which says whether this software may write.
            self._session.take_positions(0)
            self._session.commit()
            return answer

        def recover(_unknown: CommitUnknown) -> Any:
            if notes:
                return answer if self._was_committed(partial(self._has_note, notes[0])) else None
            self._session.reconnect()
            return None

        try:
            return self._transact(transaction, recover)
        except Exception as error:
            return error


def _readable(rows: Found) -> list[Event]:
    """Return the events before the first that this software cannot read. Raises Outgrown if the very first
    event cannot be read."""
    events: list[Event] = []
    for row in rows:
        try:
            events.append(event_of_row(row))
        except Outgrown:
            if not events:
                raise
            break
    return events
