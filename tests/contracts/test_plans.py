"""No statement reads a whole table of tasks: what each database plans for what runs often."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.dialects import postgresql, sqlite

from service.adapters.sql import reads, statements
from service.adapters.sql.postgres import connect_writer
from service.adapters.sql.rowset import SetStatement, postgres_text, sqlite_text
from service.adapters.sql.sqlite import SqliteFile
from service.adapters.sql.store import migrate
from service.core.task import TaskState
from service.core.units import TaskId
from service.ports import TaskFilter

BY_KEY = [
    statement
    for statement in (*statements.IN_ORDER, statements.KNOWN_KEYS, statements.KNOWN_IDS)
    if not statement.name.startswith("insert")
]
names = pytest.mark.parametrize("statement", BY_KEY, ids=lambda statement: statement.name)

Explain = Callable[[str, dict[str, Any]], str]


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


@pytest.fixture
def postgres_plan(postgres_url: str) -> Iterator[Explain]:
    with connect_writer(postgres_url) as connection:

        def explain(sql: str, values: dict[str, Any]) -> str:
            return "\n".join(line for (line,) in connection.execute(f"EXPLAIN {sql}", values))

        yield explain


@names
def test_sqlite_finds_the_rows_of_a_group_by_key(sqlite_plan: Explain, statement: SetStatement) -> None:
    plan = sqlite_plan(sqlite_text(statement, 4), {})
    scanned = {line.split()[1] for line in plan.splitlines() if line.startswith("SCAN")}
    assert scanned <= {"r", "CONSTANT", "4"}, plan


@names
def test_postgresql_finds_the_rows_of_a_group_by_key(postgres_plan: Explain, statement: SetStatement) -> None:
    plan = postgres_plan(postgres_text(statement), {"rows": json.dumps([dict.fromkeys(statement.names)])})
    assert "Seq Scan" not in plan, plan


LISTS = [
    (TaskFilter("lab"), "ix_task_tenant_id"),
    (TaskFilter("lab", after=TaskId("t")), "ix_task_tenant_id"),
    (TaskFilter("lab", states=(TaskState.PENDING,)), "ix_task_unfinished"),
    (TaskFilter("lab", states=(TaskState.FAILED,)), "ix_task_finished"),
]


@pytest.mark.parametrize(("wanted", "index"), LISTS)
def test_sqlite_lists_along_an_index(sqlite_plan: Explain, wanted: TaskFilter, index: str) -> None:
    compiled = reads.listing(wanted).compile(
        dialect=sqlite.dialect(paramstyle="qmark"), compile_kwargs={"render_postcompile": True}
    )
    plan = sqlite_plan(str(compiled), {name: compiled.params[name] for name in compiled.positiontup or ()})
    assert index in plan, plan
    assert "SCAN task" not in plan


@pytest.mark.parametrize(("wanted", "index"), LISTS)
def test_postgresql_lists_along_an_index(postgres_plan: Explain, wanted: TaskFilter, index: str) -> None:
    compiled = reads.listing(wanted).compile(
        dialect=postgresql.psycopg.dialect(), compile_kwargs={"render_postcompile": True}
    )
    plan = postgres_plan(str(compiled), dict(compiled.params))
    assert index in plan, plan
