"""What the commands of the server do. Imports all of it: whoever only stops one need not wait for that."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import nullcontext

import uvloop

from gpubroker_server.adapters.sql.move_data import move_data
from gpubroker_server.adapters.sql.session import DatabaseRefused
from gpubroker_server.adapters.sql.store import migrate, open_store
from gpubroker_server.bootstrap.exit_deadline import LastMoment
from gpubroker_server.bootstrap.object_store import open_blobs
from gpubroker_server.bootstrap.process import Process
from gpubroker_server.bootstrap.start_checks import (
    StartRefused,
    check_shared,
    check_task_surroundings,
    listening_socket,
    noted_as_broker,
    prepare_data_dir,
)
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.ports.store import StoreUnavailable
from gpubroker_server.settings.loading import Settings
from gpubroker_server.telemetry.logs import configure_logs

__all__ = [
    "StartRefused",
    "migrate_database",
    "move_database",
    "openapi_yaml",
    "run_service",
]


def run_service(settings: Settings, *, speaks: bool = True, leads: bool = True) -> int:
    """Run in the foreground until SIGTERM, SIGINT or a shutdown request; the exit code.

    `speaks`: as a gateway; `leads`: as a broker. Only on PostgreSQL may one process be without the other.
    """
    configure_logs(settings.log_level, settings.log_format)
    if not (speaks and leads):
        check_shared(settings)
    if leads:
        check_task_surroundings(settings)
    prepare_data_dir(settings.data_dir)
    with (
        listening_socket(settings.host, settings.port) if speaks else nullcontext() as listener,
        nullcontext() if speaks else noted_as_broker(settings.data_dir),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_run(settings, listener, leads=leads))


async def _run(settings: Settings, listener: socket.socket | None, *, leads: bool) -> int:
    try:
        store = await open_store(
            settings.database,
            pooled=not settings.database_notify,
            usage_half_life_seconds=Seconds(settings.policy.usage_half_life_seconds),
        )
    except DatabaseRefused as refused:
        raise StartRefused(str(refused)) from None
    last_moment = LastMoment(settings.drain_seconds)
    try:
        blobs = await open_blobs(settings, store)
        process = Process(settings, store, blobs, listener=listener, leads=leads, on_stop=last_moment.begin)
        return await process.run()
    except StoreUnavailable as fault:
        raise StartRefused(
            f"{fault}; start the database, or correct database_url (or --database-url)"
        ) from None
    finally:
        await store.close()
        last_moment.cancel()


def migrate_database(settings: Settings, revision: str, *, drop_everything: bool) -> str:
    """Bring the schema to a revision, up or down. Raises StartRefused; the database is unchanged."""
    prepare_data_dir(settings.data_dir)
    try:
        reached = migrate(settings.database, revision, drop_everything=drop_everything)
        return f"the database is now at {reached}"
    except DatabaseRefused as refused:
        raise StartRefused(str(refused)) from None


def move_database(settings: Settings, target: str, tell: Callable[[str], None]) -> None:
    """From the file of these settings to PostgreSQL. Raises StartRefused; nothing is lost in any case."""
    try:
        move_data(settings.database, target, tell)
    except DatabaseRefused as refused:
        raise StartRefused(str(refused)) from None
    tell(
        "moved; start the service with the new database_url (or --database-url), and with the data directory "
        f"{settings.data_dir}"
    )


def openapi_yaml() -> str:
    """The API's document, as `openapi.yaml` holds it."""
    from gpubroker_server.gateway.app import openapi_document
    from gpubroker_server.gateway.http import openapi as document

    return document.openapi_yaml(openapi_document())
