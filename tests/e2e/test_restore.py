"""A backup is restored while runs are alive, some of which it knows and some of which came after it."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from gpubroker import BrokerError
from psycopg import sql

from tests.chaos.forked import ForkedServiceOnRay
from tests.e2e.service_process import ROOT, environment, until
from tests.patience import PATIENCE_SECONDS
from tests.postgres import PostgresServer

RAY = {"spares": 1, "warm_runners": 1}


class Backup:
    """Of a database that no process has open."""

    url = ""
    is_online = False

    def take(self) -> None: ...

    def restore(self) -> None: ...


class FileBackup(Backup):
    def __init__(self, home: Path) -> None:
        self._file, self._copy = home / "gpubroker.db", home.with_suffix(".backup")

    def take(self) -> None:
        shutil.copy(self._file, self._copy)

    def restore(self) -> None:
        shutil.copy(self._copy, self._file)


class ServerBackup(Backup):
    """In its place on the same server, where neither its identifier nor its timeline tells of it."""

    def __init__(self, server: PostgresServer, url: str) -> None:
        self._server, self.url = server, url
        self._name = str(psycopg.conninfo.conninfo_to_dict(url)["dbname"])

    def take(self) -> None:
        self._copy(self._name, f"{self._name}_backup")

    def restore(self) -> None:
        self._server.drop(self.url)
        self._copy(f"{self._name}_backup", self._name)

    def _copy(self, source: str, target: str) -> None:
        statement = sql.SQL("CREATE DATABASE {} TEMPLATE {}")
        with psycopg.connect(self._server.url, autocommit=True) as connection:
            connection.execute(statement.format(sql.Identifier(target), sql.Identifier(source)))


class OwnBackup(Backup):
    """`gpubroker backup` beside the service, and `gpubroker restore` after everything was lost."""

    is_online = True

    def __init__(self, home: Path, server: PostgresServer | None = None) -> None:
        self._home, self._folder, self._server = home, home.with_name("backups"), server
        self.url = server.new_database() if server else ""

    def take(self) -> None:
        assert "holds everything up to" in self._run("backup")

    def restore(self) -> None:
        if self._server is None:
            for path in self._home.glob("gpubroker.db*"):
                path.unlink()
        else:
            name = psycopg.conninfo.conninfo_to_dict(self.url)["dbname"]
            self._server.drop(self.url)
            with psycopg.connect(self._server.url, autocommit=True) as connection:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(str(name))))
        shutil.rmtree(self._home / "blobs")
        assert "tasks 1 pending, 2 running; 2 objects" in self._run("restore")

    def _run(self, verb: str) -> str:
        database = ("--database-url", self.url) if self.url else ()
        words = (verb, str(self._folder), "--data-dir", str(self._home), *database)
        command = [sys.executable, "-m", "gpubroker_server", *words]
        ran = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT)
        assert ran.returncode == 0, ran.stderr
        return ran.stderr


EVIDENCE = pytest.mark.evidence


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("postgres", marks=EVIDENCE),
        pytest.param("copied file", marks=EVIDENCE),
        pytest.param("copied database", marks=EVIDENCE),
    ]
)
def backup(
    request: pytest.FixtureRequest, tmp_path: Path, postgres_server: PostgresServer
) -> Iterator[Backup]:
    home = tmp_path / "data"
    match request.param:
        case "sqlite":
            yield OwnBackup(home)
        case "copied file":
            yield FileBackup(home)
        case "postgres":
            yield (own := OwnBackup(home, postgres_server))
            postgres_server.drop(own.url)
        case _:
            url = postgres_server.new_database()
            yield ServerBackup(postgres_server, url)
            postgres_server.drop(url)
            postgres_server.drop(f"{url.partition('?')[0]}_backup?{url.partition('?')[2]}")


def processes_of(task: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if any(task in value for value in process.environ().values()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def test_restored_backup_keeps_its_tasks_and_ends_runs_it_does_not_know(
    tmp_path: Path, backup: Backup
) -> None:
    home = tmp_path / "data"
    flags = {name: tmp_path / f"{name}.flag" for name in ("kept", "ends", "waits", "lost")}

    def work(name: str) -> dict[str, str]:
        return {"witness": str(tmp_path / name), "until": str(flags[name])}

    def begins(name: str, times: int = 1) -> Callable[[], bool]:
        file = tmp_path / name
        return lambda: file.exists() and len(file.read_text(encoding="utf-8").splitlines()) >= times

    settings: dict[str, Any] = {"ray": RAY, "database_url": backup.url}
    with ForkedServiceOnRay(home, **settings) as service:
        broker = service.broker
        finished = broker.submit("tests.e2e.work:add", 2, 3, cpu=0.1)
        assert broker.result(finished.id) == 5
        kept = broker.submit("tests.e2e.work:hold", kwargs=work("kept"), gpu_mb=20_000)
        ends = broker.submit("tests.e2e.work:hold", kwargs=work("ends"), gpu_mb=20_000)
        waits = broker.submit("tests.e2e.work:hold", kwargs=work("waits"), gpu_mb=20_000)
        until(begins("kept"), "the first run has begun")
        until(begins("ends"), "the second run has begun")
        large = broker.submit("tests.e2e.work:add", "a" * 100_000, "b", cpu=0.1)
        assert len(str(broker.result(large.id))) == 100_001
        if backup.is_online:
            backup.take()
        assert service.terminate() == 0
        if not backup.is_online:
            backup.take()

        service.start()
        broker = service.broker
        flags["ends"].touch()
        assert broker.result(ends.id, timeout_seconds=PATIENCE_SECONDS) == 1
        until(begins("waits"), "the task that waited has begun")
        lost = broker.submit("tests.e2e.work:hold", kwargs=work("lost"), gpu_mb=2_000)
        until(begins("lost"), "the task that came after the backup has begun")
        assert service.terminate() == 0
        backup.restore()

        service.start()
        broker = service.broker
        with pytest.raises(BrokerError) as unknown:
            broker.get(lost.id)
        assert unknown.value.status == 404
        assert broker.result(finished.id) == 5
        assert len(str(broker.result(large.id))) == 100_001
        until(begins("waits", 2), "the waiting task has begun again, under a claim of the new lineage")
        until(lambda: not processes_of(lost.id), "the run that the backup does not know has ended")
        flags["kept"].touch()
        flags["waits"].touch()
        for task in (kept, waits, ends):
            broker.result(task.id, timeout_seconds=PATIENCE_SECONDS)
        assert not begins("kept", 2)(), "a run that the backup knows has begun again"
        until(lambda: all(gpu.leased_mb == 0 for gpu in broker.gpus()), "all memory is free again")
        log = service.log()
        assert "leading a new lineage" in log or backup.is_online
        assert re.search(f"ending a run that the database does not know.*{lost.id}", log)
