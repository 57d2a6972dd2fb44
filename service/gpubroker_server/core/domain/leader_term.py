"""How long a leader may count on its term: until a moment on its own machine's clock, never beyond.

The database keeps a term for its holder until `lease_until`, by its own clock; whoever finds that past takes
the next term. The holder cannot read that clock at each step. It counts from the moment at which it *asked*
for what was then granted, on a clock that never jumps and goes on while the machine sleeps, and stops a
margin early. So it has stopped before anybody else may begin, however slowly answers came or how long it was
stopped itself, as long as the two clocks run equally fast to within the margin.
"""

from dataclasses import dataclass
from math import inf

from gpubroker_server.core.domain.units import Instant, Seconds, Term, Ticks


@dataclass(frozen=True, slots=True)
class TenureRules:
    """`renew_seconds` leaves room for a second try, and more, before a term is over."""

    ttl_seconds: Seconds = Seconds(3.0)
    """For so long after each renewal nobody else takes the next term."""
    margin_seconds: Seconds = Seconds(0.75)
    """So much earlier its holder stops to count on it."""
    renew_seconds: Seconds = Seconds(1.0)

    def trusted_until(self, asked_at: Ticks) -> Ticks:
        """Of a lease that was asked for at this moment, and granted."""
        return Ticks(asked_at + self.ttl_seconds - self.margin_seconds)

    def renew_at(self, until: Ticks) -> Ticks:
        """The next one, of a lease that is trusted until then: so long after that was asked for, however late
        it was granted."""
        return Ticks(until - self.ttl_seconds + self.margin_seconds + self.renew_seconds)


_DECADES = Seconds(1e9)
UNTIL_PROCESS_EXIT = TenureRules(_DECADES, Seconds(0.0), _DECADES)
"""Where something better than a lease keeps others out: the lock on a SQLite file goes with its process."""


NEVER = Ticks(inf)


class Tenure:
    """One term, as its holder may count on it. Once over it stays over: a leader that has seen its end once
    has stood back, and only a new term makes it lead again."""

    def __init__(self, term: Term, until: Ticks = NEVER) -> None:
        self.term = term
        self._until = until
        self._is_over = False

    @property
    def until(self) -> Ticks:
        """Orders that are on their way at this moment are not to be carried out any more."""
        return Ticks(-inf) if self._is_over else self._until

    def extend(self, until: Ticks) -> None:
        """After a renewal; one that was overtaken by a later one changes nothing."""
        self._until = max(self._until, until)

    def is_over(self, now: Ticks) -> bool:
        self._is_over = self._is_over or now >= self._until
        return self._is_over

    def seconds_left(self, now: Ticks) -> Seconds:
        return Seconds(max(0.0, self.until - now))


@dataclass(frozen=True, slots=True)
class LeaderRow:
    """Who leads, as the database has it."""

    term: Term
    holder: str
    lease_until: Instant
    at: Instant
    """The database's time when this was read."""

    @property
    def is_past(self) -> bool:
        return self.lease_until <= self.at


@dataclass(frozen=True, slots=True)
class LeadershipStatus:
    """How one process stands to the lead."""

    term: Term | None = None
    """None while it does not lead."""
    seconds_left: Seconds = Seconds(0.0)
    """So long it may lead without another renewal."""
    takeovers: int = 0
    """How often it began to lead."""


@dataclass(frozen=True, slots=True)
class ObservedLeader:
    """The row as a candidate found it first, and when that was on its own clock."""

    row: LeaderRow
    since: Ticks

    def next(self, row: LeaderRow, now: Ticks) -> "ObservedLeader":
        same = (row.term, row.lease_until) == (self.row.term, self.row.lease_until)
        return ObservedLeader(row, self.since if same else now)

    def may_take(self, now: Ticks, rules: TenureRules) -> bool:
        """Whether the leader has let its term go: by the database's clock, or because it has renewed nothing
        for so long that it must have stopped. The second holds when that clock was set back meanwhile, which
        makes a lease look longer than anybody asked for."""
        return self.row.is_past or now - self.since > rules.ttl_seconds
