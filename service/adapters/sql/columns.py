"""What all tables are made of."""

from collections.abc import Iterable
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, Integer, MetaData, Text, text

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
