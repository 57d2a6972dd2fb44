"""What a group commit asks of a database connection, whichever database it is."""

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from gpubroker_server.adapters.sql.rowset import Row, Rows, SetStatement
from gpubroker_server.core.domain.units import Instant, Position, Term
from gpubroker_server.core.world.events import Event

SETTING: Final = "database_url (or --database-url)"
"""What refusals call the place where a database is named: either a file may say it, or whoever starts."""


class DatabaseRefused(Exception):
    """This database must not or cannot be used; the text says why and what to do."""


class GuardMissed(Exception):
    """Fewer rows were written than the statement was given: some were changed or taken meanwhile."""

    def __init__(self, statement: SetStatement, given: int, written: int) -> None:
        super().__init__(f"{statement.name}: {written} of {given} rows written")
        self.statement = statement


class ConstraintFailed(Exception):
    """A constraint of a table said no."""


class Collided(Exception):
    """The database ended the transaction because it stood in another one's way; tried again it may pass."""


class ConnectionLost(Exception):
    """The connection broke before COMMIT was sent: nothing of the transaction was kept."""


class CommitUnknown(Exception):
    """The connection broke after COMMIT was sent."""

    events: Sequence[Event] = ()
    """What will be in the log if it was committed."""


class Session(Protocol):
    """The one writing connection of a process, used by its writer thread alone.

    Errors of the driver come out as the exceptions above, as StoreUnavailable, as Unstorable, or, when they
    are mistakes of ours, as they are. After any of them the transaction must be rolled back.
    """

    def begin(self) -> None: ...

    def write(self, statement: SetStatement, rows: Sequence[Row] | Rows) -> None:
        """Send rows. A guard may be judged only by `number`, which waits for everything sent so far."""
        ...

    def fetch(self, statement: SetStatement, rows: Sequence[Row]) -> Sequence[Sequence[Any]]:
        """Send rows and wait for what comes back; inside a transaction or outside of one."""
        ...

    def ask(self, statement: SetStatement, rows: Sequence[Row]) -> Callable[[], Sequence[Sequence[Any]]]:
        """Send rows; what comes back is to be had once `number` has waited for everything sent so far."""
        ...

    def require_term(self, term: Term) -> None:
        """Lock the leader's row and see to it that `term` still holds. Raises StaleTerm, by `number`."""
        ...

    def number(self, events: int) -> tuple[Position, Instant]:
        """Take the head of the log: the first of `events` new positions, and the database's time."""
        ...

    def commit(self) -> None: ...

    def rollback(self) -> None:
        """End the transaction, if there is one; raises nothing."""
        ...

    def has_event(self, event: Event) -> bool:
        """Whether exactly this event is in the log; waits for a commit of it that is still under way.

        Another leader may have decided the same meanwhile: what tells the two apart is the time.
        """
        ...

    def now(self) -> Instant: ...

    def end_hanging(self) -> None:
        """Throw out other sessions of ours that stopped in the middle of a transaction, and hold what others
        wait for, where the database does not do so by itself."""
        ...

    def tell_resigned(self) -> None:
        """To others that listen, with the commit: nobody leads any more."""
        ...

    def reconnect(self) -> None:
        """Raises StoreUnavailable."""
        ...

    def rest(self) -> None:
        """Nobody has written for a while: do what would hold up writes. Raises nothing."""
        ...

    def close(self) -> None: ...
