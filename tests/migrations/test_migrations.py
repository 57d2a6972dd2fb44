"""The schema that migrations make is the schema that the code expects, up and down, on both databases."""

import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from gpubroker_server.adapters.sql.session import DatabaseRefused
from gpubroker_server.adapters.sql.store import migrate, open_store
from gpubroker_server.adapters.sql.system_tables import SCHEMA
from gpubroker_server.adapters.sql.tables import metadata
from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.task import TaskState
from sqlalchemy import Connection, Engine, create_engine, inspect, text
from sqlalchemy.pool import NullPool

from tests.contracts.lived_in import all_of, live_in
from tests.contracts.scenes import a_submission, opened
from tests.migrations.newer import CONTRACT, migrate_as_newer_software_does

ROOT = Path(__file__).resolve().parents[2]
NEWEST = f"{SCHEMA:04}"


POSTGRES_FACTS = (
    """
    SELECT table_name || '.' || column_name || ' ' || data_type || coalesce(' ' || collation_name, '')
        || ' ' || is_nullable || ' ' || coalesce(column_default, '')
    FROM information_schema.columns WHERE table_schema = 'public'
    """,
    """
    SELECT conrelid::regclass || ': ' || conname || ' ' || pg_get_constraintdef(oid)
    FROM pg_constraint WHERE connamespace = 'public'::regnamespace
    """,
    "SELECT indexdef FROM pg_indexes WHERE schemaname = 'public'",
    """
    SELECT relname || ': ' || reloptions::text FROM pg_class
    WHERE relnamespace = 'public'::regnamespace AND reloptions IS NOT NULL
    """,
)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'gpubroker.db'}"
    return str(request.getfixturevalue("empty_postgres_url"))


def engine_of(url: str) -> Engine:
    return create_engine(url.replace("postgresql://", "postgresql+psycopg://"), poolclass=NullPool)


def looked_at(url: str, look: Callable[[Connection], Any]) -> Any:
    with engine_of(url).connect() as connection:
        return look(connection)


def tables_of(connection: Connection) -> set[str]:
    return set(inspect(connection).get_table_names()) - {"alembic_version"}


def facts_of(connection: Connection) -> set[str]:
    """Everything that a database says of its own schema, line by line."""
    if connection.dialect.name == "sqlite":
        made = connection.execute(text("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"))
        return {
            f"{name}: {' '.join(part.split()).rstrip(',')}"
            for name, sql in made
            if name != "alembic_version"
            for line in sql.splitlines()
            for part in line.split(", ")  # where columns stand that were added later
        }
    lines = {line for query in POSTGRES_FACTS for (line,) in connection.execute(text(query))}
    return {line for line in lines if "alembic_version" not in line}


def test_the_newest_schema_is_the_one_in_tables(url: str) -> None:
    migrate(url, "head")

    def differences(connection: Connection) -> list[Any]:
        return list(compare_metadata(MigrationContext.configure(connection), metadata))

    assert looked_at(url, differences) == []


def test_checks_partial_indexes_and_storage_are_the_ones_in_tables(url: str) -> None:
    migrate(url, "head")
    migrated = looked_at(url, facts_of)
    migrate(url, "base", drop_everything=True)
    with engine_of(url).begin() as connection:
        metadata.create_all(connection)
    assert migrated == looked_at(url, facts_of)


def test_a_schema_goes_down_to_nothing_and_up_again(url: str) -> None:
    assert migrate(url, "head") == NEWEST
    before = looked_at(url, facts_of)
    assert migrate(url, "base", drop_everything=True) == "base"
    assert looked_at(url, tables_of) == set()
    assert migrate(url, "head") == NEWEST
    assert looked_at(url, facts_of) == before


def test_a_schema_at_the_newest_revision_stays_as_it_is(url: str) -> None:
    assert [migrate(url, "head"), migrate(url, "head"), migrate(url, NEWEST)] == [NEWEST] * 3


def test_a_revision_that_does_not_exist_changes_nothing(url: str) -> None:
    migrate(url, "head")
    before = looked_at(url, facts_of)
    for revision in ("4711", "3", "-1", "nope"):
        refusal = f"cannot be brought to revision {revision}: there are base, 0001, .*{NEWEST} and head"
        with pytest.raises(DatabaseRefused, match=refusal):
            migrate(url, revision)
    assert looked_at(url, facts_of) == before


async def test_all_tables_are_dropped_only_with_the_flag(url: str) -> None:
    assert migrate(url, "base") == "base"
    async with opened(url) as store:
        await store.submit(a_submission("t1"))
    with pytest.raises(DatabaseRefused, match=r"drops every table.*--drop-everything"):
        migrate(url, "base")
    async with opened(url) as store:
        assert await store.head() == 1


async def test_a_store_migrates_what_it_opens_and_keeps_what_is_in_it(url: str) -> None:
    store = await open_store(url)
    await store.submit(a_submission("t1"))
    await store.close()
    assert migrate(url, "head") == NEWEST
    store = await open_store(url)
    assert await store.head() == 1
    await store.close()


async def test_what_is_in_a_database_outlives_the_way_down_and_up_again(url: str) -> None:
    async with opened(url) as store:
        await live_in(store)
        before = await all_of(store)
    for revision in range(SCHEMA - 1, 0, -1):
        assert migrate(url, f"{revision:04}") == f"{revision:04}"
    async with opened(url) as store:
        assert await all_of(store) == before


@pytest.mark.parametrize("revision", [f"{number:04}" for number in range(1, SCHEMA)])
async def test_a_database_is_the_same_one_after_the_way_down_and_up_again(url: str, revision: str) -> None:
    """Its directory of objects belongs to it, and to a new one it would not."""
    async with opened(url) as store:
        known = await store.claim_blobs("0123456789abcdef-1", instead_of="")
    migrate(url, revision)
    async with opened(url) as store:
        assert await store.blobs() == known


@pytest.mark.parametrize(("table", "states"), [("task", TaskState), ("lease", LeaseState)])
def test_a_states_check_names_the_states_of_the_core(url: str, table: str, states: Any) -> None:
    migrate(url, "head")

    def words(connection: Connection) -> set[str]:
        checks = inspect(connection).get_check_constraints(table)
        [check] = [check["sqltext"] for check in checks if check["name"] == f"ck_{table}_state"]
        return set(re.findall(r"'(\w+)'", str(check)))

    assert looked_at(url, words) == {str(state) for state in states}


def columns_of(connection: Connection) -> set[tuple[str, str, str, bool]]:
    seen = inspect(connection)
    return {
        (table, column["name"], str(column["type"]), column["nullable"])
        for table in tables_of(connection)
        for column in seen.get_columns(table)
    }


def test_a_migration_that_takes_away_says_which_software_may_go_on(url: str, tmp_path: Path) -> None:
    def usable_from(connection: Connection) -> int:
        return int(connection.execute(text("SELECT compatible_from FROM log_head")).scalar_one())

    before: set[tuple[str, str, str, bool]] = set()
    for revision in range(1, SCHEMA + 1):
        migrate(url, f"{revision:04}")
        after = looked_at(url, columns_of)
        assert before <= after or looked_at(url, usable_from) == revision, before - after
        before = after
    migrate_as_newer_software_does(url, tmp_path / "newer", CONTRACT[0])
    assert not before <= looked_at(url, columns_of), "the comparison sees a column that is gone"


def test_processes_that_start_together_migrate_once(empty_postgres_url: str) -> None:
    code = (
        "import sys; from gpubroker_server.adapters.sql.store import migrate; "
        "print(migrate(sys.argv[1], 'head'))"
    )
    command = [sys.executable, "-c", code, empty_postgres_url]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(3)]
    assert [process.communicate()[0].strip() for process in running] == [NEWEST] * 3


def test_an_installed_package_brings_its_migrations(tmp_path: Path) -> None:
    uv = ROOT / ".tools" / "bin" / "uv"
    command = [str(uv), "build", "--wheel", "--quiet", "--offline", "--out-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    code = (
        "import sys; from gpubroker_server.adapters.sql import store; "
        "from gpubroker_server.adapters.sql import database; "
        "print(database.__file__, store.migrate(sys.argv[1], 'head'))"
    )
    url = f"sqlite:///{tmp_path / 'gpubroker.db'}"
    ran = subprocess.run(
        [sys.executable, "-c", code, url],
        cwd=tmp_path / "installed", env={"PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    where, revision = ran.stdout.split()
    assert where.startswith(str(tmp_path / "installed"))
    assert revision == NEWEST
