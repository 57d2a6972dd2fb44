"""The time for which a leader may rely on its term. It ends at an instant on the clock of the leader's
machine.

The database keeps a term for its holder until `lease_until` by the database's clock; another candidate that
finds that instant past takes the next term. The holder cannot read the database's clock at every step. So the
holder counts from the moment at which it *asked* for the lease, on a clock that never jumps and runs while
the machine sleeps, and stops a margin early. Thus it has stopped before another leader can begin, however
slow the answer was and however long its process was suspended, as long as the two clocks drift apart by less
than the margin.
"""

from enum import StrEnum
from math import inf

from msgspec import Struct

from gpubroker_server.core.domain.units import Instant, Lineage, MonotonicSeconds, Seconds, Term


class LeaderTermRules(Struct, frozen=True):
    """The durations of a term. `renew_seconds` leaves time for more than one retry before the term ends."""

    ttl_seconds: Seconds = Seconds(3.0)
    """The time after each renewal in which no other candidate takes the next term."""
    margin_seconds: Seconds = Seconds(0.75)
    """The time before the end of its lease at which the holder stops relying on its term."""
    renew_seconds: Seconds = Seconds(1.0)

    def trusted_until(self, asked_at: MonotonicSeconds) -> MonotonicSeconds:
        return MonotonicSeconds(asked_at + self.ttl_seconds - self.margin_seconds)

    def renew_at(self, until: MonotonicSeconds) -> MonotonicSeconds:
        """Return when to renew a lease that is trusted until `until`: `renew_seconds` after the lease was
        asked for, whenever the answer came."""
        return MonotonicSeconds(until - self.ttl_seconds + self.margin_seconds + self.renew_seconds)


_DECADES = Seconds(1e9)
UNTIL_PROCESS_EXIT = LeaderTermRules(_DECADES, Seconds(0.0), _DECADES)
"""Rules for a database with a stronger lock that keeps others out: the lock on a SQLite file ends with its
process."""


NEVER = MonotonicSeconds(inf)

_LINEAGE_EPOCH = Instant(1_735_689_600.0)
"""2025-01-01T00:00:00Z. Lineages stay below 2**31 until 2093."""


def next_lineage(last: Lineage, now: Instant) -> Lineage:
    """Return a lineage that is higher than any number that an earlier lineage can have given to a claim. That
    holds because no holder is claimed once a second for long."""
    return Lineage(max(last + 1, int(now - _LINEAGE_EPOCH)))


class LeaderTerm:
    """One term, as far as its holder may rely on it. A term that is over stays over: only a new term makes
    the process lead again."""

    def __init__(self, term: Term, until: MonotonicSeconds = NEVER) -> None:
        self.term = term
        self._until = until
        self._is_over = False

    @property
    def until(self) -> MonotonicSeconds:
        """The instant after which orders of this term must not be carried out."""
        return MonotonicSeconds(-inf) if self._is_over else self._until

    def extend(self, until: MonotonicSeconds) -> None:
        """Extend after a renewal; an out-of-order renewal changes nothing."""
        self._until = max(self._until, until)

    def end(self) -> None:
        self._is_over = True

    def is_over(self, now: MonotonicSeconds) -> bool:
        self._is_over = self._is_over or now >= self._until
        return self._is_over

    def seconds_left(self, now: MonotonicSeconds) -> Seconds:
        return Seconds(max(0.0, self.until - now))


FIRST_LINEAGE = Lineage(0)


class LeaderRow(Struct, frozen=True):
    term: Term
    holder: str
    lease_until: Instant
    at: Instant
    lineage: Lineage = FIRST_LINEAGE
    server: str = ""
    """The server on which the term was taken; empty if unknown."""

    @property
    def is_past(self) -> bool:
        return self.lease_until <= self.at


class RefusedTerm(StrEnum):
    """Meanings that the refusal of an order by a node agent can have for a leader that has read the leader
    row."""

    OVER = "over"
    """The term is over: another process leads."""
    LOST = "lost"
    """The database was set back: it has lost a term that it had given."""
    ELSEWHERE = "elsewhere"
    """The agent takes orders of a later lineage, which this database has never had: another database has
    replaced this one, or this one was restored from before that lineage."""
    NOTHING = "nothing"


def refused_term(row: LeaderRow, own: Term, known: tuple[Lineage, Term]) -> RefusedTerm:
    """Return the meaning of a refusal. `own` is the leader's term; `known` is the lineage and the term that
    the agent named; `row` was read after the agent's answer."""
    lineage, term = known
    if row.term != own:
        return RefusedTerm.OVER
    if lineage == row.lineage and term >= row.term:
        return RefusedTerm.LOST  # an equal term was given to another process
    return RefusedTerm.ELSEWHERE if lineage > row.lineage else RefusedTerm.NOTHING


class ObservedLeader(Struct, frozen=True):
    """A leader row, and the time on a candidate's own clock at which the candidate first saw it."""

    row: LeaderRow
    since: MonotonicSeconds

    def next(self, row: LeaderRow, now: MonotonicSeconds) -> "ObservedLeader":
        same = (row.term, row.lease_until) == (self.row.term, self.row.lease_until)
        return ObservedLeader(row, self.since if same else now)

    def may_take(self, now: MonotonicSeconds, rules: LeaderTermRules) -> bool:
        """Return True if the lease has expired by the database's clock, or was not renewed for its whole
        duration by the candidate's clock. The second rule matters if the database's clock was set back, which
        makes a lease look longer than it is."""
        return self.row.is_past or now - self.since > rules.ttl_seconds
