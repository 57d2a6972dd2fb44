"""The types and constraints that all tables use, the tables about the installation itself, and the checks
that this software can read the database's schema and events."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from gpubroker_server.ports.store import LogOutgrown, Outgrown

SCHEMA = 22
"""The number of the newest migration that this software knows."""

READER = 4
"""The newest form of events that this software can read. A release that writes events of a new form gives
them a higher number; events that older software understands keep their number."""


def check_schema(compatible_from: int) -> None:
    """Check that this software may use the database. `compatible_from` is the oldest schema whose software
    may use the database. Raises Outgrown."""
    if compatible_from > SCHEMA:
        raise Outgrown(
            f"the database needs software of schema {compatible_from} or newer, and this software knows "
            f"schema {SCHEMA}; upgrade this process"
        )


def is_another_server(taken_on: str, server: str) -> bool:
    """Return True if `server`, on which a term is continued, is not the server on which the term was taken. A
    database server that does not tell its identifier never counts as another one."""
    return bool(taken_on and server) and taken_on != server


def check_reader(reader: int) -> None:
    """Check that this software can read the form of an event. Raises LogOutgrown, because without the event
    the World of this process would be wrong."""
    if reader > READER:
        raise LogOutgrown(
            f"the log has events of form {reader}, and this software reads forms up to {READER}; "
            "upgrade this process"
        )


metadata = MetaData(
    naming_convention={
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    }
)

Id = Text().with_variant(Text(collation="C"), "postgresql")
"""The column type of ids. Ids are ordered byte by byte, as in Python, which is the order of submission."""
Count = BigInteger().with_variant(Integer(), "sqlite")
"""The column type of 64-bit numbers. SQLite's INTEGER holds 64 bits too, and only a column of type INTEGER
can be the key of SQLite's rows."""

HOT: dict[str, Any] = {
    "sqlite_with_rowid": False,
    "postgresql_with": {
        "fillfactor": "70",
        "autovacuum_vacuum_scale_factor": "0.02",
        "autovacuum_vacuum_threshold": "200",
        "autovacuum_analyze_scale_factor": "0.02",
    },
}
"""Options of tables whose rows change several times. They leave room for the next version of a row on the
same page, and start the vacuum early."""


def one_of(column: str, values: Iterable[str]) -> CheckConstraint:
    return CheckConstraint(f"{column} IN ({', '.join(repr(str(value)) for value in values)})", name=column)


def where(sqlite: str, postgresql: str = "") -> dict[str, Any]:
    """Return the options that give a partial index its condition. A database uses the index only for queries
    with the same condition."""
    return {"sqlite_where": text(sqlite), "postgresql_where": text(postgresql or sqlite)}


SQLITE_NOW = "gpubroker_now"
"""The name of an SQL function that all connections to SQLite define, because SQLite's own clock has only
milliseconds."""


class now(FunctionElement[float]):  # noqa: N801  # it is called, as `sqlalchemy.func.now` is
    """The SQL expression for the time of the database's clock when it runs the statement."""

    type = Double()
    inherit_cache = True


@compiles(now, "postgresql")
def _on_postgres(_element: now, _compiler: Any, **_options: Any) -> str:
    return "extract(epoch from clock_timestamp())::float8"


@compiles(now, "sqlite")
def _on_sqlite(_element: now, _compiler: Any, **_options: Any) -> str:
    return f"{SQLITE_NOW}()"


class MoveStage(StrEnum):
    """The stages of a move of all data to another database. Each of the two databases records its own stage.

    At most one of the two may be served: the old one until its stage is GONE, the new one once its stage is
    HERE.
    """

    LEAVING = "leaving"
    """The move has begun. This old database is served as before, and the data in the new database does not
    count."""
    COMING = "coming"
    """All data is in this new database. It must not be served, because the old one may still be served."""
    GONE = "gone"
    """The new database has all data; this old one must never be served again."""
    HERE = "here"
    """All data is in this new database, and the old one has recorded GONE, so this one may be served."""


log_head = Table(
    "log_head",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("position", Count, nullable=False),
    Column("compatible_from", Integer, nullable=False),
    CheckConstraint("id = 1", name="one_row"),
    **HOT,
)
"""The row with the log's newest position. Every transaction that writes locks this row, so the row also says
which software may write: software that knows the schema `compatible_from` or a newer one."""

leadership = Table(
    "leadership",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("term", Integer, nullable=False),
    Column("holder", Text, nullable=False),
    Column("taken_at", Double, nullable=False),
    Column("lease_until", Double, nullable=False),
    Column("lineage", Count, nullable=False, server_default=text("0")),
    Column("server", Text, nullable=False, server_default=text("''")),
    CheckConstraint("id = 1", name="one_row"),
    **HOT,
)
"""The leader's row. `server` is the database server on which the term was taken, as in `Session.server`;
empty if the database is a file."""

installation = Table(
    "installation",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("blobs", Text),
    Column("token_changes", Count, nullable=False, server_default=text("0")),
    CheckConstraint("id = 1", name="one_row"),
    **HOT,
)
"""The row of the installation. `blobs` is the directory of objects that belongs to this database.
`token_changes` tells processes that hold tokens in memory when to read them again."""

last_value = Table(
    "last_value",
    metadata,
    Column("kind", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("revision", Count, nullable=False),
    Column("value", Text, nullable=False),
    PrimaryKeyConstraint("kind", "key"),
    **HOT,
)
"""The newest values that the leader and the gateways publish outside the event log, by kind and key. `value`
is JSON; `revision` rises with each write and each term, so an older leader cannot overwrite the value of a
newer one."""

token = Table(
    "token",
    metadata,
    Column("name", Text, primary_key=True),
    Column("sha256", Text, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("scopes", Text, nullable=False),
    Column("max_priority", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    UniqueConstraint("sha256"),
)

idle_template = Table(
    "idle_template",
    metadata,
    Column("name", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("task", Text, nullable=False),
    Column("demand", Text, nullable=False),
    Column("weight", Integer, nullable=False),
    Column("max_running", Integer, nullable=False),
    Column("token", Text, nullable=False),
    Column("made_by", Text, nullable=False),
    Column("made_at", Double, nullable=False),
)
"""Templates of tasks for idle GPUs. `task` is the request body of their tasks as JSON; `token` is the
`sha256` of the token that made the template."""

audit = Table(
    "audit",
    metadata,
    Column("id", Count, primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("reason", Text, nullable=False),
)
"""The audit log. Each row is written in the transaction of the change that it records. `reason` is the reason
that the operator gave."""

work_stream = Table(
    "work_stream",
    metadata,
    Column("name", Text, primary_key=True),
    Column("curriculum", Double),
    Column("progress", Double),
    Column("progress_at", Double, nullable=False),
    Column("velocity_per_hour", Double, nullable=False),
    Column("data_at", Double),
    Column("quality", Double, nullable=False),
)
"""The newest progress and signals that operators and clients have reported for each work stream."""

relocation = Table(
    "relocation",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("move", Text, nullable=False),
    Column("stage", Text, nullable=False),
    Column("other", Text, nullable=False),
    Column("at", Double, nullable=False),
    CheckConstraint("id = 1", name="one_row"),
    one_of("stage", MoveStage),
)
"""The move of all data from or to another database (`move_data`). Without a move there is no row. `other` is
a name of the other database that people recognize."""

worker_set = Table(
    "worker_set",
    metadata,
    Column("id", Id, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("fields", Text, nullable=False),
)
"""The worker sets that have not ended. `fields` is the worker set as JSON."""
