"""How far a move of everything to another database has come, as each of the two says."""

from enum import StrEnum


class Stage(StrEnum):
    LEAVING = "leaving"
    """It was begun; this database is served as before, and what the other one has is worth nothing yet."""
    COMING = "coming"
    """Everything is here, but the other database may still be served: this one must not."""
    GONE = "gone"
    """The other database has everything; this one must never be served again."""
    HERE = "here"
    """Everything is here, and the other database knows."""
