"""Carries out the commands that need the whole server. `gpubroker down` does not import this module."""

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import structlog
import typer
import uvloop

from gpubroker_server.adapters.sql.database import connections_kept
from gpubroker_server.adapters.sql.session import DatabaseRefused
from gpubroker_server.adapters.sql.store import begin_lineage, migrate, open_store
from gpubroker_server.bootstrap.broker_file import BrokerFile, hold_service_file
from gpubroker_server.bootstrap.object_store import open_blobs
from gpubroker_server.bootstrap.process import Process
from gpubroker_server.bootstrap.run_access import url_of
from gpubroker_server.bootstrap.start_checks import (
    StartRefused,
    batches_without_effect,
    check_disk_roots,
    check_gpus,
    check_installed,
    check_ray_access,
    check_reach,
    check_shared,
    check_task_surroundings,
    keep_private,
    listening_socket,
    prepare_data_dir,
)
from gpubroker_server.bootstrap.starting import StartingFile
from gpubroker_server.ports.store import StoreUnavailable
from gpubroker_server.settings.loading import Settings
from gpubroker_server.telemetry.logs import configure_logs

log = structlog.get_logger("gpubroker")


@contextmanager
def refusing() -> Iterator[None]:
    """Print the message of a refusal to standard error, and exit with 2."""
    try:
        yield
    except (DatabaseRefused, StartRefused) as refused:
        typer.echo(f"gpubroker: {refused}", err=True)
        raise typer.Exit(2) from None


class ExitDeadline:
    """Ends the process when its time to stop is over. Acknowledged requests are not lost, just as after a
    power cut."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def begin(self) -> None:
        """Start the deadline. Later calls change nothing."""
        if self._timer.ident is None:
            self._timer.start()

    def cancel(self) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        log.error(f"stopping took longer than {self._seconds:g} s (drain_seconds); ending now")
        sys.stderr.flush()
        os._exit(1)


def run_service(settings: Settings, *, speaks: bool = True, leads: bool = True) -> int:
    """Run in the foreground until SIGTERM, SIGINT or a shutdown request, and return the exit code.

    The process is a gateway if it `speaks`, and a broker if it `leads`. SQLite needs both in one process.
    """
    configure_logs(settings.log_level, settings.log_format)
    check_installed(settings, leads=leads)
    if not (speaks and leads):
        check_shared(settings)
    if speaks:
        check_reach(settings)
    if leads:
        check_task_surroundings(settings)
        check_ray_access(settings)
        check_gpus(settings)
        check_disk_roots(settings)
        if fault := batches_without_effect(settings):
            log.warning(fault)
    prepare_data_dir(settings.data_dir)
    if settings.objects.exists():
        keep_private(settings.objects)
    with (
        listening_socket(settings.host, settings.port) if speaks else nullcontext() as listener,
        nullcontext() if speaks else BrokerFile(settings.data_dir) as broker_file,
        StartingFile(settings.data_dir) as starting,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        if listener is not None:
            hold_service_file(settings.data_dir, url_of(listener))
        work = _run(settings, listener, leads=leads, on_start=starting.started)
        return runner.run(work if broker_file is None else broker_file.renewed_during(work))


async def _run(
    settings: Settings,
    listener: socket.socket | None,
    *,
    leads: bool,
    on_start: Callable[[], None] = lambda: None,
) -> int:
    try:
        store = await open_store(
            settings.database,
            pooled=not settings.database_notify,
            may_lose_commits=settings.database_may_lose_commits,
            leads=leads,
            usage_half_life_seconds=settings.policy.usage_half_life_seconds,
        )
    except DatabaseRefused as refused:
        raise StartRefused(str(refused)) from None
    if store.is_shared:
        kept = connections_kept(pooled=not settings.database_notify, leads=leads)
        log.info("connected to the database", connections=kept)
    deadline = ExitDeadline(settings.drain_seconds)
    try:
        blobs = await open_blobs(settings, store)
        process = Process(
            settings, store, blobs,
            listener=listener, leads=leads, on_start=on_start, on_stop=deadline.begin,
        )  # fmt: skip
        return await process.run()
    except StoreUnavailable as fault:
        raise StartRefused(
            f"{fault}; start the database, or correct database_url (or --database-url)"
        ) from None
    finally:
        await store.close()
        deadline.cancel()


def migrate_database(settings: Settings, revision: str, *, drop_everything: bool) -> str:
    """Bring the schema up or down to a revision, and return a message. Raises StartRefused and
    DatabaseRefused, and then leaves the database unchanged."""
    prepare_data_dir(settings.data_dir)
    reached = migrate(settings.database, revision, drop_everything=drop_everything)
    return f"the database is now at {reached}"


def start_new_lineage(settings: Settings) -> str:
    """Begin a new lineage, and return a message. Raises DatabaseRefused, and then leaves the database
    unchanged."""
    return f"the database is now in lineage {begin_lineage(settings.database)}"


def move_database(settings: Settings, target: str, report: Callable[[str], None]) -> None:
    """Copy the SQLite file of these settings to PostgreSQL. Raises DatabaseRefused; the file then still has
    all data."""
    from gpubroker_server.adapters.sql.copying.move_data import move_data

    move_data(settings.database, target, report)
    report(
        "moved; start the service with the new database_url (or --database-url), and with the data directory "
        f"{settings.data_dir}"
    )


def openapi_yaml() -> str:
    """Return the text of openapi.yaml."""
    from gpubroker_server.gateway.app import openapi_document
    from gpubroker_server.http import openapi as document

    return document.openapi_yaml(openapi_document())
