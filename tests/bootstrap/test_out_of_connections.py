"""A database that has no connection left: for a start, for a gateway that runs, and for its clients."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from gpubroker_server.adapters.sql.database import open_database
from gpubroker_server.adapters.sql.session import DatabaseRefused
from psycopg import sql
from psycopg.conninfo import make_conninfo

from tests.bootstrap.refusals import WAITING, refusal
from tests.chaos.forked import ForkedGateway
from tests.contracts.proxy import a_proxy, to_postgres, url_through
from tests.e2e.service_process import ServiceProcess, until
from tests.patience import PATIENCE_SECONDS
from tests.postgres import PostgresServer

NEEDED = 6
"""By a gateway."""
USER = "gpubroker_of_test"


class Limited:
    """A database, and a user of it with few connections."""

    def __init__(self, server: PostgresServer) -> None:
        admin = server.new_database()
        self._admin = make_conninfo(admin)
        self.url = admin.replace("//postgres@", f"//{USER}@", 1)
        assert self.url != admin
        database = sql.Identifier(str(psycopg.conninfo.conninfo_to_dict(admin)["dbname"]))
        self.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(USER)))
        self.execute(sql.SQL("ALTER DATABASE {} OWNER TO {}").format(database, sql.Identifier(USER)))
        self.execute(sql.SQL("GRANT ALL ON SCHEMA public TO {}").format(sql.Identifier(USER)))

    def limit(self, connections: int) -> None:
        self.execute(
            sql.SQL("ALTER ROLE {} CONNECTION LIMIT {}").format(
                sql.Identifier(USER), sql.Literal(connections)
            )
        )

    def execute(self, statement: Any) -> None:
        with psycopg.connect(self._admin, autocommit=True) as connection:
            connection.execute(statement)

    def are_open(self, connections: int) -> bool:
        asked = "SELECT count(*) FROM pg_stat_activity WHERE usename = %s"
        with psycopg.connect(self._admin) as connection:
            return connection.execute(asked, [USER]).fetchall() == [(connections,)]


@pytest.fixture
def limited(postgres_server: PostgresServer) -> Iterator[Limited]:
    limited = Limited(postgres_server)
    yield limited
    postgres_server.drop(limited.url)
    with psycopg.connect(make_conninfo(postgres_server.url), autocommit=True) as connection:
        connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(USER)))


def settings_of(limited: Limited, tmp_path: Path) -> dict[str, Any]:
    return {**WAITING, "database_url": limited.url, "blob_dir": str(tmp_path / "objects")}


@pytest.mark.parametrize("left", [1, NEEDED - 1])
def test_a_process_that_cannot_have_all_its_connections_does_not_start(
    limited: Limited, tmp_path: Path, left: int
) -> None:
    limited.limit(left)
    said = refusal(ForkedGateway(tmp_path / "data", **settings_of(limited, tmp_path)))
    assert "out of database connections" in said
    assert f"keeps {NEEDED} connections: 1 that writes, 4 that read, 1 that listens" in said


def test_a_start_waits_for_connections_that_are_being_closed(limited: Limited, tmp_path: Path) -> None:
    limited.limit(NEEDED)
    gateway = ForkedGateway(tmp_path / "data", **settings_of(limited, tmp_path))
    with ThreadPoolExecutor(1) as threads, psycopg.connect(limited.url):
        starting = threads.submit(gateway.start)
        until(lambda: starting.done() or limited.are_open(NEEDED), "the gateway lacks one connection")
    starting.result().stop()


async def test_a_start_whose_server_falls_silent_says_so(limited: Limited) -> None:
    limited.limit(NEEDED)
    async with a_proxy(to_postgres(limited.url)) as proxy:
        starting = asyncio.create_task(asyncio.to_thread(open_database, url_through(proxy, limited.url)))
        while not proxy.taken:  # noqa: ASYNC110  # until it is the first
            await asyncio.sleep(0)
        proxy.is_silent = True
        with pytest.raises(DatabaseRefused, match=r"cannot use PostgreSQL at .*: connection timeout"):
            await starting


def ask(gateway: ServiceProcess, path: str) -> httpx.Response:
    bearer = {"Authorization": f"Bearer {gateway.token}"}
    return httpx.get(f"{gateway.url}{path}", headers=bearer, timeout=PATIENCE_SECONDS)


def test_gateway_keeps_its_connections_and_says_when_others_took_them(
    limited: Limited, tmp_path: Path
) -> None:
    limited.limit(NEEDED + 1)  # one more for the migration
    with ForkedGateway(tmp_path / "data", **settings_of(limited, tmp_path)) as gateway, ExitStack() as stack:
        # A connection counts until its process has ended.
        until(lambda: limited.are_open(NEEDED), "the gateway has its connections and no others")
        others = [stack.enter_context(psycopg.connect(limited.url))]
        with pytest.raises(psycopg.OperationalError, match="too many connections"):
            psycopg.connect(limited.url)
        assert all(ask(gateway, "/readyz").status_code == 200 for _ in range(20))
        task = gateway.broker.submit("tests.e2e.work:add")

        limited.limit(1)
        limited.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'gpubroker%'"
        )
        until(lambda: "out of database" in ask(gateway, "/readyz").json()["parts"]["store"], "it says why")
        refused = ask(gateway, f"/tasks/{task.id}")
        assert (refused.status_code, refused.json()["code"]) == (503, "store-unavailable")
        assert "out of database connections: too many connections for role" in refused.json()["detail"]
        others.pop().close()
        limited.limit(NEEDED + 1)
        until(lambda: ask(gateway, "/readyz").status_code == 200, "it has its connections again")
        assert gateway.broker.get(task).state == "pending"
