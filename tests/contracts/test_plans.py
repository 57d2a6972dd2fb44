"""No statement reads a whole table of tasks: what each database plans for what runs often."""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from gpubroker_server.adapters.sql import objects, reads, run_logs, statements
from gpubroker_server.adapters.sql.connections import connect_reader, connect_writer
from gpubroker_server.adapters.sql.session import SetStatement, postgres_text
from gpubroker_server.adapters.sql.sqlite import SqliteFile, sqlite_chunks, sqlite_text
from gpubroker_server.adapters.sql.store import migrate, open_store
from gpubroker_server.core.domain.orders import LogName
from gpubroker_server.core.domain.policy import Cutoffs
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Fence, Instant, Position, TaskId
from gpubroker_server.ports.arrays import PageFilter
from gpubroker_server.ports.objects import ObjectOrder
from gpubroker_server.ports.store import SubmitVerdict, TaskFilter
from msgspec.structs import replace
from sqlalchemy import Select
from sqlalchemy.dialects import postgresql, sqlite

from tests.builders import a_task
from tests.collector import garbage
from tests.contracts.scenes import a_submission, admission, next_term, opened, with_gpu

BY_KEY = [
    statement
    for statement in (*statements.IN_ORDER, statements.known_keys, statements.known_ids)
    if not statement.name.startswith("insert")
]
HOT = ("lease", "task_spec", "task", "device")
"""They may grow by thousands of rows before they are counted again."""
OF_MANY = [statements.MOVE_TASKS, statements.MOVE_LEASES, statements.lease_memory]
"""Each for thousands of rows, when all tasks of a queue are cancelled at once."""
names = pytest.mark.parametrize("statement", BY_KEY, ids=lambda statement: statement.name)

Explain = Callable[[str, dict[str, Any]], str]

SQLITE_VALUES = 32_766
"""So many a statement of SQLite takes, unless it was built to take more."""


@pytest.fixture(scope="module")
def sqlite_plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explain]:
    path = tmp_path_factory.mktemp("plans") / "gpubroker.db"
    migrate(f"sqlite:///{path}", "head")
    file = SqliteFile(Path(path))
    connection = file.writer()

    def explain(sql: str, values: dict[str, Any]) -> str:
        marks = list(values.values()) if values else [None] * sql.count("?")
        return "\n".join(row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}", marks))

    yield explain
    connection.close()
    file.close()


@pytest.fixture(params=["small", "emptied"])
async def postgres_plan(postgres_url: str, request: pytest.FixtureRequest) -> AsyncIterator[Explain]:
    """Of tables whose statistics say that they are small, or that all rows are gone: the moments at which a
    planner likes to look at all that is there."""
    store = await open_store(postgres_url)
    term = await with_gpu(store, a_task("t1"))
    await store.commit(term, [admission(a_task("t1"))])
    await store.close()
    with connect_writer(postgres_url) as connection:
        if request.param == "emptied":
            for table in HOT:
                connection.execute(f"DELETE FROM {table}")
        connection.execute("ANALYZE")

        def explain(sql: str, values: dict[str, Any]) -> str:
            return "\n".join(line for (line,) in connection.execute(f"EXPLAIN {sql}", values))

        yield explain


def test_the_longest_statement_of_sqlite_has_no_more_values_than_it_takes() -> None:
    [most] = {len(rows) for rows in sqlite_chunks([()] * 10_000)}
    written = {s.name: sqlite_text(s, most).count("?") for s in statements.IN_ORDER}
    assert not {name: values for name, values in written.items() if values > SQLITE_VALUES}


@names
def test_sqlite_finds_the_rows_of_a_group_by_key(sqlite_plan: Explain, statement: SetStatement) -> None:
    plan = sqlite_plan(sqlite_text(statement, 4), {})
    scanned = {line.split()[1] for line in plan.splitlines() if line.startswith("SCAN")}
    assert scanned <= {"r", "CONSTANT", "4"}, plan


@names
def test_postgresql_finds_the_rows_of_a_group_by_key(postgres_plan: Explain, statement: SetStatement) -> None:
    plan = postgres_plan(postgres_text(statement), {"rows": json.dumps([dict.fromkeys(statement.names)])})
    assert "Seq Scan" not in plan, plan


@pytest.mark.parametrize("statement", OF_MANY, ids=lambda statement: statement.name)
def test_postgresql_walks_through_no_table_for_each_row_of_a_large_group(
    postgres_plan: Explain, statement: SetStatement
) -> None:
    plan = postgres_plan(postgres_text(statement), {"rows": json.dumps([dict.fromkeys(statement.names)])})
    assert "Join Filter" not in plan, plan
    assert "Index Cond" in plan, plan


MANY_TASKS = """
INSERT INTO task (id, tenant, name, priority, demand, submitted_at, max_retries, grace_seconds, shareable,
    stream, subject, after, awaits, held, state, finished)
SELECT lpad(n::text, 6, '0'), 'tenant-' || n % 20, 'job', 50, '{}', 0, 0, 30, false,
    '', 'job', '[]', false, false,
    CASE WHEN n % 11 = 0 THEN 'pending' WHEN n % 11 = 1 THEN 'failed' ELSE 'succeeded' END, n % 11 > 0
FROM generate_series(1, 20000) AS n
"""
THEIR_SPECS = """
INSERT INTO task_spec (task, tenant, kind, entrypoint, command, arguments, python, env, result_format, labels,
    model_type, working_directory)
SELECT id, tenant, 'entrypoint', 'jobs:train', '[]', '', '', '{}', 'json', '{}', '', '' FROM task
"""


@pytest.fixture
def postgres_plan_of_many(postgres_url: str) -> Iterator[Explain]:
    """As a reader sees it, of 20,000 tasks of 20 tenants, one in eleven of them pending."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(MANY_TASKS)
        connection.execute(THEIR_SPECS)
        connection.execute("ANALYZE")
    with connect_reader(postgres_url) as connection:

        def explain(sql: str, values: dict[str, Any]) -> str:
            return "\n".join(line for (line,) in connection.execute(f"EXPLAIN {sql}", values))

        yield explain


LONG_LOG = """
WITH appended AS (
    INSERT INTO event (position, at, kind, key, version, tenant, fields, reader)
    SELECT n, 0, 'task.started', 'task_' || n, 1, 'default', '"' || repeat('x', 200) || '"', 1
    FROM generate_series(1, 20000) AS n
)
UPDATE log_head SET position = 20000
"""
TOLD = "SELECT pg_stat_force_next_flush()"
"""Last in a session: what it counted is there for the next one."""
FETCHED = "SELECT idx_tup_fetch + seq_tup_read FROM pg_stat_user_tables WHERE relname = %s"


@contextmanager
def fetched_at_most(most: int, table: str, url: str) -> Iterator[None]:
    """Rows, by sessions that begin and end within: they tell at their end, and those before it by `TOLD`."""
    with psycopg.connect(url, autocommit=True) as connection:
        [(before,)] = connection.execute(FETCHED, [table]).fetchall()
    yield
    with psycopg.connect(url, autocommit=True) as connection:
        [(after,)] = connection.execute(FETCHED, [table]).fetchall()
    assert after - before <= most


@pytest.mark.parametrize("is_analyzed", [True, False])
async def test_what_others_have_appended_is_read_without_the_log_before_it(
    postgres_url: str, is_analyzed: bool
) -> None:
    """Between two commits of its own by who commits, and after them by who catches up."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(LONG_LOG)
        if is_analyzed:
            connection.execute("ANALYZE")
        connection.execute(TOLD)
    with fetched_at_most(500, "event", postgres_url):
        async with opened(postgres_url) as one, opened(postgres_url) as other:
            for turn in range(8):  # more often than a plan is made anew for each
                assert (await other.submit(a_submission(f"theirs-{turn}"))).verdict is SubmitVerdict.ACCEPTED
                assert (await one.submit(a_submission(f"ours-{turn}"))).verdict is SubmitVerdict.ACCEPTED
            await other.catch_up()


async def test_what_is_over_is_found_without_the_tasks_that_are_kept(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(MANY_TASKS)
        connection.execute(THEIR_SPECS)
        connection.execute("UPDATE task SET finished_at = 100 + id::int WHERE finished")
        connection.execute("ANALYZE")
        connection.execute(TOLD)
    with fetched_at_most(500, "task", postgres_url):
        async with opened(postgres_url) as store:
            term = await next_term(store)
            kept = Cutoffs(Instant(100), Instant(0), Instant(0), Instant(0), Position(0))
            assert not await store.prune(term, kept)
            assert await store.prune(term, replace(kept, finished=Instant(131), keyed=Instant(1)))


MANY_OBJECTS = """
INSERT INTO stored_object (tenant, digest, size_bytes, created_at, expires_at)
SELECT CASE WHEN n % 10 = 0 THEN 'zeta' ELSE 'acme' END, md5(n::text), 4096, 0, 1000 + n
FROM generate_series(1, 20000) AS n
"""


@pytest.mark.parametrize("is_analyzed", [True, False])
async def test_a_page_of_objects_is_read_without_those_of_other_pages(
    postgres_url: str, is_analyzed: bool
) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(MANY_OBJECTS)
        if is_analyzed:
            connection.execute("ANALYZE")
        connection.execute(TOLD)
    with fetched_at_most(2000, "stored_object", postgres_url):
        async with opened(postgres_url) as store:
            for turn in range(8):  # more often than a plan is made anew for each
                page = await store.stored_objects(
                    "acme", Instant(0), ObjectOrder(), after=(f"{turn}",), limit=100
                )
                assert len(page) == 100


def test_sqlite_pages_objects_along_their_key(sqlite_plan: Explain) -> None:
    page = objects.listing("acme", Instant(0), ObjectOrder(), ("a",), 100)
    compiled = page.compile(dialect=sqlite.dialect(paramstyle="qmark"))
    plan = sqlite_plan(str(compiled), {name: compiled.params[name] for name in compiled.positiontup or ()})
    assert "sqlite_autoindex_stored_object_1 (tenant=? AND digest>?)" in plan, plan
    assert "TEMP B-TREE" not in plan, plan


ARRAY = TaskId("task_1")
LOG = {**LogName(ARRAY, Fence(1), 0, "stdout")._asdict(), "after": 5000, "most": 8}
PAGES: dict[str, tuple[Select[Any], dict[str, Any], str]] = {
    "items in order": (reads.pages_of(PageFilter(ARRAY, after=5000)), {}, "(array=? AND first>?)"),
    "failed items": (reads.pages_of(PageFilter(ARRAY, after=5000, failed=True)), {}, "(array=? AND first>?)"),
    "items by commit": (reads.pages_of(PageFilter(ARRAY, True, 5000)), {}, "(array=? AND page>?)"),
    "parts of a log": (
        run_logs.PARTS, LOG, "(task=? AND fence=? AND rank=? AND stream=? AND first_byte>?)"
    ),
}  # fmt: skip
"""Statement, its parameters, and the columns by which SQLite searches an index."""
pages = pytest.mark.parametrize("page", PAGES)


@pages
def test_sqlite_finds_the_first_row_of_a_page_by_an_index(sqlite_plan: Explain, page: str) -> None:
    query, given, searched = PAGES[page]
    compiled = query.compile(dialect=sqlite.dialect(paramstyle="qmark"))
    values = compiled.construct_params(given)
    marks = [values[name] for name in compiled.positiontup or ()]
    plan = sqlite_plan(str(compiled), {str(place): value for place, value in enumerate(marks)})
    assert searched in plan, plan
    assert "SCAN" not in plan.replace("SCALAR", ""), plan
    assert "TEMP B-TREE" not in plan, plan


MANY_PAGES = """
INSERT INTO item_page ("array", first, page, tenant, count, failed, at, lines)
SELECT 'task_1', 10 * n, n + 1, 'default', 10, n % 2, 0, '' FROM generate_series(0, 20000) AS n
"""
MANY_PARTS = """
INSERT INTO run_log (task, fence, rank, stream, first_byte, size_bytes, at, tenant, data)
SELECT 'task_1', 1, 0, 'stdout', 10 * n, 10, 0, 'default', '' FROM generate_series(0, 20000) AS n
"""


@pages
def test_postgresql_finds_the_first_row_of_a_page_by_an_index(postgres_url: str, page: str) -> None:
    query, given, searched = PAGES[page]
    compiled = query.compile(dialect=postgresql.psycopg.dialect())  # type: ignore[no-untyped-call]
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(MANY_PAGES)
        connection.execute(MANY_PARTS)
        connection.execute("ANALYZE")
    with connect_reader(postgres_url) as connection:
        explained = connection.execute(f"EXPLAIN {compiled}", compiled.construct_params(given))
        plan = [line for (line,) in explained]
    bounded = searched.removesuffix(">?)").split()[-1]
    assert any("Index Cond" in line and f"({bounded} >" in line for line in plan), plan
    assert not any("Seq Scan" in line or "Sort" in line for line in plan), plan


LISTS = [
    (TaskFilter("tenant-0"), "ix_task_tenant_id"),
    (TaskFilter("tenant-0", after=("004000",)), "ix_task_tenant_id"),
    (TaskFilter("tenant-0", after=("004000",), descending=False), "ix_task_tenant_id"),
    (TaskFilter("tenant-0", states=(TaskState.PENDING,)), "ix_task_unfinished"),
    (TaskFilter("tenant-0", states=(TaskState.FAILED,)), "ix_task_finished"),
    (TaskFilter("tenant-0", kind="external"), "ix_task_external"),
    (TaskFilter("tenant-0", kind="external", quarantined=True), "ix_task_external"),
]


def test_making_a_list_leaves_hardly_anything_to_the_collector_of_cycles() -> None:
    """It comes rarely, and lists are asked for every few seconds: see `make_full_collections_rare`."""
    wanted = TaskFilter("tenant-0", states=(TaskState.PENDING,), kind="command", quarantined=False)
    reads.listing(wanted)
    with garbage() as left:
        for _ in range(10):
            reads.listing(wanted)
    assert left.objects < 10 * 50


@pytest.mark.parametrize(("wanted", "index"), LISTS)
def test_sqlite_lists_along_an_index(sqlite_plan: Explain, wanted: TaskFilter, index: str) -> None:
    compiled = reads.listing(wanted).compile(
        dialect=sqlite.dialect(paramstyle="qmark"), compile_kwargs={"render_postcompile": True}
    )
    plan = sqlite_plan(str(compiled), {name: compiled.params[name] for name in compiled.positiontup or ()})
    assert index in plan, plan
    assert "SCAN task" not in plan


@pytest.mark.parametrize("wanted", [wanted for wanted, _ in LISTS])
def test_postgresql_lists_without_reading_all_tasks(
    postgres_plan_of_many: Explain, wanted: TaskFilter
) -> None:
    compiled = reads.listing(wanted).compile(
        dialect=postgresql.psycopg.dialect(),  # type: ignore[no-untyped-call]
        compile_kwargs={"render_postcompile": True},
    )
    plan = postgres_plan_of_many(str(compiled), dict(compiled.params))
    assert "Seq Scan on task " not in plan, plan
