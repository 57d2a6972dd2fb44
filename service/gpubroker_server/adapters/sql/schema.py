"""Bringing a database to a schema. Where it is the newest already nothing is loaded that could change it."""

from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from gpubroker_server.adapters.sql.compatibility import SCHEMA

NEWEST = f"{SCHEMA:04}"
_REVISION = text("SELECT version_num FROM alembic_version")


def bring_to(engine: Engine, revision: str, name: str, *, drop_everything: bool = False) -> str:
    """Migrate up or down to a revision (`head`, `base`, `0003`, ...); the revision reached, or `base`.

    `name` is the database's name for people. Raises DatabaseRefused; the schema is unchanged.
    """
    if revision == "head" and _is_newest(engine):
        return NEWEST
    # alembic: a tenth of what a start loads, and hardly any start has something to migrate.
    from gpubroker_server.adapters.sql.migrate import migrate_to

    return migrate_to(engine, revision, name, drop_everything=drop_everything)


def _is_newest(engine: Engine) -> bool:
    try:
        with engine.connect() as connection:
            return connection.execute(_REVISION).scalars().all() == [NEWEST]
    except DBAPIError:
        return False  # there is none, or it cannot be used: who migrates says why
