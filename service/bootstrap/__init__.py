"""The composition root: settings become adapters, adapters become one running service."""

import asyncio
import socket

import uvloop

from service.adapters.sql.session import DatabaseRefused
from service.adapters.sql.store import migrate, open_store
from service.bootstrap.down import stop_everything
from service.bootstrap.premises import StartRefused, listening_socket, prepare_data_dir
from service.bootstrap.process import Service
from service.gateway import document
from service.gateway.app import openapi_document
from service.settings import Settings
from service.telemetry import configure_logs

__all__ = ["StartRefused", "migrate_database", "openapi_yaml", "run_service", "stop_everything"]


def run_service(settings: Settings) -> int:
    """Run in the foreground until SIGTERM, SIGINT or a shutdown request; the exit code."""
    configure_logs(settings.log_level, settings.log_format)
    prepare_data_dir(settings.data_dir)
    with (
        listening_socket(settings.host, settings.port) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_serve(settings, listener))


async def _serve(settings: Settings, listener: socket.socket) -> int:
    try:
        store = await open_store(settings.database)
    except DatabaseRefused as refused:
        raise StartRefused(str(refused)) from None
    try:
        return await Service(settings, listener, store).run()
    finally:
        await store.close()


def migrate_database(settings: Settings, revision: str) -> str:
    """Bring the schema to a revision, up or down. Raises StartRefused; the database is unchanged."""
    prepare_data_dir(settings.data_dir)
    try:
        return f"the database is now at {migrate(settings.database, revision)}"
    except DatabaseRefused as refused:
        raise StartRefused(str(refused)) from None


def openapi_yaml() -> str:
    """The API's document, as `openapi.yaml` holds it."""
    return document.openapi_yaml(openapi_document())
