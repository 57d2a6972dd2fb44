"""What all tables are made of."""

from collections.abc import Iterable
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, Double, Integer, MetaData, Text, text
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

metadata = MetaData(
    naming_convention={
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    }
)

Id = Text().with_variant(Text(collation="C"), "postgresql")
"""Ids are ordered byte by byte, as Python orders them: the order of submission."""
Count = BigInteger().with_variant(Integer(), "sqlite")
"""64 bits; SQLite's INTEGER is that, and only by that name the row's own key."""

HOT: dict[str, Any] = {
    "sqlite_with_rowid": False,
    "postgresql_with": {
        "fillfactor": "70",
        "autovacuum_vacuum_scale_factor": "0.02",
        "autovacuum_vacuum_threshold": "200",
        "autovacuum_analyze_scale_factor": "0.02",
    },
}
"""Rows that change several times: room on their page for the next version, and vacuum before it is many."""


def one_of(column: str, values: Iterable[str]) -> CheckConstraint:
    return CheckConstraint(f"{column} IN ({', '.join(repr(str(value)) for value in values)})", name=column)


def where(sqlite: str, postgresql: str = "") -> dict[str, Any]:
    """What makes an index partial, spelled as each database compares it with a query's own words."""
    return {"sqlite_where": text(sqlite), "postgresql_where": text(postgresql or sqlite)}


SQLITE_NOW = "gpubroker_now"
"""A function that our connections have: SQLite's own clock tells milliseconds."""


class now(FunctionElement[float]):  # noqa: N801  # it is called, as `sqlalchemy.func.now` is
    """The database's time, when the statement comes to it."""

    type = Double()
    inherit_cache = True


@compiles(now, "postgresql")
def _on_postgres(_element: now, _compiler: Any, **_options: Any) -> str:
    return "extract(epoch from clock_timestamp())::float8"


@compiles(now, "sqlite")
def _on_sqlite(_element: now, _compiler: Any, **_options: Any) -> str:
    return f"{SQLITE_NOW}()"
