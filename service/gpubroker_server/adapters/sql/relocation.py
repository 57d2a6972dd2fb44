"""Which of two databases may be served, while everything moves from one to the other and ever after.

At every instant at most one: the first until it says `gone`, the second from when it says `here`. Whoever is
killed in between leaves marks by which the next one knows how far it had come.
"""

from dataclasses import dataclass

from sqlalchemy import Connection, Engine, delete, insert, select

from gpubroker_server.adapters.sql.reads import now
from gpubroker_server.adapters.sql.session import DatabaseRefused
from gpubroker_server.adapters.sql.stage import Stage
from gpubroker_server.adapters.sql.tables import relocation


@dataclass(frozen=True, slots=True)
class Mark:
    """`move`: the same in both databases, and in no others."""

    move: str
    stage: Stage
    other: str


def read_mark(connection: Connection) -> Mark | None:
    row = relocation.c
    found = connection.execute(select(row.move, row.stage, row.other)).one_or_none()
    return None if found is None else Mark(found[0], Stage(found[1]), found[2])


def set_mark(connection: Connection, mark: Mark) -> None:
    connection.execute(delete(relocation))
    values = {"id": 1, "move": mark.move, "stage": mark.stage.value, "other": mark.other}
    connection.execute(insert(relocation).values(**values, at=now(connection)))


def check_served_here(engine: Engine, name: str) -> None:
    """Raises DatabaseRefused where that would make two services of one."""
    with engine.connect() as connection:
        mark = read_mark(connection)
    match mark:
        case Mark(stage=Stage.GONE, other=other):
            raise DatabaseRefused(
                f"{name} has been moved to {other}; name that one with database_url (or --database-url), or "
                "move this one away"
            )
        case Mark(stage=Stage.COMING, other=other):
            raise DatabaseRefused(
                f"the move of {other} to {name} is not finished; run the same `gpubroker migrate-data` "
                "again, or name another database with database_url (or --database-url)"
            )
