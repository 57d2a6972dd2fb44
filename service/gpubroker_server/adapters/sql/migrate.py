"""Migrations of the schema with alembic, from a checkout or from an installed package."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from msgspec import Struct
from sqlalchemy import Connection, Engine, inspect, text
from sqlalchemy.exc import DBAPIError

from gpubroker_server.adapters.sql.session import DatabaseRefused
from gpubroker_server.adapters.sql.system_tables import SCHEMA

_INSTALLED = Path(__file__).parent / "migrations"
_CHECKOUT = Path(__file__).parents[4] / "migrations"
_LOCK = 0x67706272
"""The key of the advisory lock of PostgreSQL that the migrating process holds, while others that start wait
for it."""
_OTHERS = text("""
SELECT DISTINCT application_name FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'gpubroker%'
    AND application_name <> current_setting('application_name')
ORDER BY 1
""")
"""Finds the other processes of gpubroker. A process that starts opens a session before it waits for the lock
and reads the revision. So either this query sees its session, or the process finds the new revision."""


def migrate_to(engine: Engine, revision: str, name: str, *, drop_everything: bool) -> str:
    """Migrate up or down to a revision, and return the revision that is reached. Raises DatabaseRefused."""
    try:
        with engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
            config = _config(connection)
            current = MigrationContext.configure(connection).get_current_revision()
            _check_ours(connection, current, name)
            if current is None or _knows(config, current):
                _move(config, current, _Goal(revision, name, drop_everything))
            else:
                _check_compatible(connection, current, name, goes_elsewhere=revision != "head")
            return MigrationContext.configure(connection).get_current_revision() or "base"
    except CommandError as error:
        raise DatabaseRefused(f"{name} cannot be brought to revision {revision}: {error}") from None
    except DBAPIError as error:
        raise DatabaseRefused(
            f"{name} cannot be used: {error.orig}; "
            "restore it from a backup, or name another with database_url (or --database-url)"
        ) from None


class _Goal(Struct, frozen=True):
    revision: str
    of: str
    """The name of the database in error messages."""
    drop_everything: bool


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(_INSTALLED if _INSTALLED.is_dir() else _CHECKOUT))
    config.attributes["connection"] = connection
    return config


def _check_ours(connection: Connection, current: str | None, name: str) -> None:
    if current is None and inspect(connection).has_table("task"):
        raise DatabaseRefused(
            f"{name} has a table `task` that is not gpubroker's; name another with database_url (or "
            "--database-url)"
        )


def _knows(config: Config, revision: str) -> bool:
    scripts = ScriptDirectory.from_config(config)
    return revision in {script.revision for script in scripts.walk_revisions()}


def _check_compatible(connection: Connection, current: str, name: str, *, goes_elsewhere: bool) -> None:
    """Check that this software may use a schema that newer software has migrated. Such a schema is not
    changed. Raises DatabaseRefused."""
    compatible_from = connection.execute(text("SELECT compatible_from FROM log_head")).scalar_one()
    if compatible_from > SCHEMA:
        raise DatabaseRefused(
            f"{name} has schema {current}: a newer gpubroker took away what this one uses, whose schema is "
            f"{SCHEMA:04}; upgrade gpubroker to one of schema {compatible_from:04} or newer, or restore "
            "a backup from before that"
        )
    if goes_elsewhere:
        raise DatabaseRefused(
            f"{name} was written by a newer gpubroker (its schema is {current}, this one knows up to "
            f"{SCHEMA:04}); upgrade gpubroker, or restore an older backup"
        )


def _move(config: Config, current: str | None, goal: _Goal) -> None:
    known = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
    known = ["base", *reversed(known)]
    target = known[-1] if goal.revision == "head" else goal.revision
    if target not in known:
        raise DatabaseRefused(
            f"{goal.of} cannot be brought to revision {goal.revision}: there are {', '.join(known)} and head"
        )
    if known.index(target) < known.index(current or "base"):
        _check_way_down(config.attributes["connection"], target, goal)
        command.downgrade(config, target)
    else:
        command.upgrade(config, target)


def _check_way_down(connection: Connection, target: str, goal: _Goal) -> None:
    if target == "base" and not goal.drop_everything:
        raise DatabaseRefused(
            f"base is before the first revision: going there drops every table of {goal.of}, with all tasks, "
            "results, tokens and the log; if that is what you want, say --drop-everything"
        )
    if connection.dialect.name != "postgresql":
        return  # Nobody else uses the file, because this process holds its lock.
    # Lock the table before the sessions are listed: a process that starts later waits and reads the new
    # revision.
    connection.execute(text("LOCK TABLE alembic_version IN ACCESS EXCLUSIVE MODE"))
    if others := connection.execute(_OTHERS).scalars().all():
        raise DatabaseRefused(
            f"{goal.of} is in use: {'; '.join(others)}; going back to revision {goal.revision} takes away "
            "what they need, so stop them first"
        )
