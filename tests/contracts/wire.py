"""A wire between a client and PostgreSQL that can be cut at a chosen moment."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from enum import Enum, auto
from pathlib import Path

import pytest
from gpubroker_server.adapters.sql.connections import TimedConnection
from psycopg.conninfo import conninfo_to_dict

from tests.places import short_place


class Cut(Enum):
    NEVER = auto()
    BEFORE_COMMIT = auto()
    """The server never sees the COMMIT."""
    AFTER_COMMIT = auto()
    """The server commits, and its answer is lost."""
    GOODBYE = auto()
    """The server commits, says so, and in the same breath that it ends this connection."""


@contextmanager
def little_patience() -> Iterator[None]:
    """Who waits for PostgreSQL meanwhile gives up at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TimedConnection, "answer_seconds", property(lambda _: 0.1, lambda *_: None))
        yield


_READY = b"Z\0\0\0\5I"
_TOLD = b"SFATAL\0VFATAL\0C57P01\0Mterminating connection due to administrator command\0\0"
_GOODBYE = b"E" + (len(_TOLD) + 4).to_bytes(4, "big") + _TOLD


class Wire:
    """Passes bytes on; `cut` is what happens at the next COMMIT, once."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self.cut = Cut.NEVER
        self.was_cut = asyncio.Event()
        self.is_down = False
        self.down_at: bytes | None = None
        """What a client says, after a COMMIT has passed, that makes the wire go down before it gets there."""
        self._committed = False
        self._passes = asyncio.Event()
        self._passes.set()

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_down:
            writer.close()
            return
        there_reader, there_writer = await asyncio.open_unix_connection(self._target)
        self._writers |= {writer, there_writer}
        passing = (
            self._pass(reader, there_writer, writer, watch=True),
            self._pass(there_reader, writer, there_writer),
        )
        with suppress(asyncio.CancelledError):  # the test is over
            await asyncio.gather(*passing)

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        back: asyncio.StreamWriter,
        watch: bool = False,
    ) -> None:
        try:
            while data := await reader.read(65536):
                if watch and self.down_at is not None:
                    if self._committed and self.down_at in data:
                        self.was_cut.set()
                        self.go_down()
                        break
                    self._committed |= b"COMMIT" in data
                if not watch and self.cut is Cut.GOODBYE and b"COMMIT" in data and data.endswith(_READY):
                    data = data.removesuffix(_READY) + _GOODBYE
                    self.cut = Cut.NEVER
                    self.was_cut.set()
                cut = self.cut if watch and b"COMMIT" in data and self.cut is not Cut.GOODBYE else Cut.NEVER
                if cut is not Cut.NEVER:
                    self.cut = Cut.NEVER
                    self.was_cut.set()
                    back.close()
                if cut is Cut.BEFORE_COMMIT:
                    break
                await self._passes.wait()
                writer.write(data)
                await writer.drain()
        except (ConnectionError, BrokenPipeError):
            pass
        finally:
            writer.close()
            back.close()

    def hold(self) -> None:
        """Take every byte and pass none on, with all connections open."""
        self._passes.clear()

    def go_on(self) -> None:
        self._passes.set()

    def go_down(self) -> None:
        """Cut every connection and take no new one."""
        self.is_down = True
        for writer in self._writers:
            writer.close()

    def come_back(self) -> None:
        self.is_down = False
        self.down_at = None


@asynccontextmanager
async def a_wire(url: str) -> AsyncIterator[tuple[Wire, str]]:
    """The wire to a server on a Unix socket, and the URL that goes through it."""
    parts = conninfo_to_dict(url)
    wire = Wire(str(Path(str(parts["host"])) / f".s.PGSQL.{parts.get('port', 5432)}"))
    with tempfile.TemporaryDirectory(prefix="gpubroker-wire-", dir=short_place()) as folder:
        server = await asyncio.start_unix_server(wire.connect, f"{folder}/.s.PGSQL.5432")
        yield wire, f"postgresql://{parts['user']}@/{parts['dbname']}?host={folder}"
        server.close()
        wire.go_down()
