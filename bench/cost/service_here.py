"""The whole service on one event loop in this process, and a client that sends it one request at a time."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gpubroker_server.adapters.sql import writer
from gpubroker_server.bootstrap import commands
from gpubroker_server.bootstrap.start_checks import prepare_data_dir
from gpubroker_server.settings.loading import load_settings
from gpubroker_server.telemetry.logs import configure_logs
from msgspec import Struct

from bench.cost.counting import SERVICE
from bench.cost.ray_stand_in import begin_in
from bench.cost.virtual_time import WorkOfThreads
from bench.http import Target

START_SECONDS = 30.0
WAIT_SECONDS = 300.0
"""The seconds of virtual time that the client waits for a state."""

SELDOM = {"POLICY__SAMPLE_PERIOD_SECONDS": "60", "POLICY__BEAT_SECONDS": "60"}
"""Settings with which nodes are measured less often than by default, since it would be chance whether a
measurement falls into the counted time."""

ADDRESS = ("127.0.0.1", 8470)


class UnixListener(socket.socket):
    """A Unix socket that reports an IP address as its own. TCP delivers when the kernel has time for it,
    which the clock of this process could not wait for."""

    def __init__(self, path: Path) -> None:
        super().__init__(socket.AF_UNIX)
        self.bind(str(path))
        self.listen()

    def getsockname(self) -> tuple[str, int]:
        return ADDRESS


def watch_writer(work: WorkOfThreads) -> None:
    """Make the clock stand still until the thread that writes to the database has answered."""
    put = writer.Writer.put

    def counted_put(database_writer: writer.Writer, works: Sequence[writer.Work]) -> None:
        for unit in works:
            work.await_answer(unit.future)
        put(database_writer, works)

    writer.Writer.put = counted_put  # type: ignore[assignment,method-assign]


class ServiceHere(Struct, frozen=True):
    token: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def encoded(self, method: str, path: str, body: str = "", *, zeros: int = 0, **headers: str) -> bytes:
        all_headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        all_headers |= {name.replace("_", "-"): value for name, value in headers.items()}
        return Target(ADDRESS[1], method, path, all_headers, body, zeros).encoded()

    async def must_answer(self, request: bytes, status: int) -> bytes:
        """Send a request and return the body of its answer. Raises RuntimeError if it has another status."""
        self.writer.write(request)
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        _, _, length = head.partition(b"\r\ncontent-length:")
        body = await self.reader.readexactly(int(length.partition(b"\r\n")[0] or 0))
        if int(head[9:12]) != status:
            raise RuntimeError(f"{request[:60]!r} should be answered with {status}: {head!r} {body[:2000]!r}")
        return body

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Return the JSON answer to a GET, or to a POST that must be accepted."""
        text = "" if body is None else json.dumps(body)
        return json.loads(
            await self.must_answer(self.encoded(method, path, text), 200 if body is None else 202)
        )

    async def wait_until(self, path: str, name: str, *values: str) -> Any:
        """Wait until a field of this resource has one of these values, and return the resource."""
        async with asyncio.timeout(WAIT_SECONDS):
            while (resource := await self.ask("GET", path))[name] not in values:  # noqa: ASYNC110  # no event
                await asyncio.sleep(0.05)
        return resource


@asynccontextmanager
async def service_here(folder: Path, **settings: str) -> AsyncIterator[ServiceHere]:
    """Run `gpubroker serve` with these settings (names without GPUBROKER_) and yield once it is ready."""
    all_settings = {
        "DATA_DIR": str(folder),
        "TASK_PATH": str(Path(__file__).parents[2]),
        **SELDOM,
        **settings,
    }
    os.environ.update({f"GPUBROKER_{name}": value for name, value in all_settings.items()})
    loaded = load_settings()
    configure_logs(loaded.log_level, loaded.log_format, (folder / "service.log").open("w"))
    prepare_data_dir(loaded.data_dir)
    listener = UnixListener(folder / "http.sock")
    running = begin_in(
        SERVICE, lambda: commands._run(loaded, listener, leads=True)
    )  # without the choice of a loop
    client = await _client_file(folder / "client.json", running)
    reader, writer = await asyncio.open_unix_connection(folder / "http.sock")
    this_service = ServiceHere(str(client["token"]), reader, writer)
    await _until_placeable(this_service)
    yield this_service
    running.cancel()


async def _client_file(path: Path, running: "asyncio.Task[Any]") -> Mapping[str, Any]:
    async with asyncio.timeout(START_SECONDS):
        while not (text := _text_of(path)):
            if running.done():
                running.result()
            await asyncio.sleep(0.05)
    connection: dict[str, Any] = json.loads(text)
    return connection


def _text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


async def _until_placeable(this_service: ServiceHere) -> None:
    async with asyncio.timeout(START_SECONDS):
        while not (await this_service.ask("GET", "/stats"))["nodes"]["ready"]:  # noqa: ASYNC110  # it sends no event
            await asyncio.sleep(0.05)
