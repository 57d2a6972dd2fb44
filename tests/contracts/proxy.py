"""A line over TCP on which things go wrong as they do in networks."""

import asyncio
import socket
import struct
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from math import inf
from random import Random

from msgspec import Struct
from psycopg.conninfo import conninfo_to_dict

Connect = Callable[[], Awaitable[tuple[StreamReader, StreamWriter]]]

_AT_ONCE = 65536
_UNDER_WAY = 64
"""Reads of one direction that are on their way at once; then whoever sends has to wait."""
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER of no time: closing says RST and not FIN."""


class Weather(Struct, frozen=True):
    """What each direction of each connection meets."""

    delay_seconds: float = 0.0
    jitter_seconds: float = 0.0
    """At most so much more delay, for each read; the order of bytes is kept."""
    bytes_per_second: float = inf
    piece_bytes: int = _AT_ONCE
    """What is sent at once."""


CLEAR = Weather()


class Proxy:
    """Passes bytes on between whoever connects to `port` and where `connect` leads."""

    def __init__(self, connect: Connect, chance: Random) -> None:
        self._connect = connect
        self._chance = chance
        self._pairs: set[Pair] = set()
        self.port = 0
        self.taken = 0
        """Connections so far."""
        self.weather = CLEAR
        self.is_silent = False
        """New connections are taken, and say nothing for ever."""
        self.is_refusing = False

    async def take(self, reader: StreamReader, writer: StreamWriter) -> None:
        if self.is_refusing:
            _reset(writer)
            return
        try:
            there = await self._connect()
        except OSError:
            _reset(writer)
            return
        self.taken += 1
        pair = Pair((reader, writer), there, self)
        self._pairs.add(pair)
        with suppress(asyncio.CancelledError):  # the test is over
            await pair.pass_on()
        self._pairs.discard(pair)

    def delay(self) -> float:
        return self.weather.delay_seconds + self._chance.random() * self.weather.jitter_seconds

    def fall_silent(self) -> None:
        """Half-open, for ever: those that there are take every byte, pass none on, and hear of no end."""
        for pair in self._pairs:
            pair.is_silent = True

    def reset(self) -> None:
        for pair in list(self._pairs):
            pair.reset()

    def close_one_side(self) -> None:
        """The server is told of the end, and the client is not."""
        for pair in list(self._pairs):
            pair.close_one_side()


class Pair:
    """One connection: both its ends."""

    def __init__(
        self, here: tuple[StreamReader, StreamWriter], there: tuple[StreamReader, StreamWriter], proxy: Proxy
    ) -> None:
        self._here, self._there = here, there
        self._proxy = proxy
        self._over = asyncio.Event()
        self.is_silent = proxy.is_silent

    async def pass_on(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass(self._here[0], self._there[1]))
                tasks.create_task(self._pass(self._there[0], self._here[1]))
        except* OSError:
            pass
        finally:
            self.reset()

    def reset(self) -> None:
        self._over.set()
        for _, writer in (self._here, self._there):
            _reset(writer)

    def close_one_side(self) -> None:
        self.is_silent = True
        self._there[1].close()

    async def _pass(self, reader: StreamReader, writer: StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_UNDER_WAY)
        arriving = asyncio.create_task(self._arrive(way, writer))
        try:
            due = 0.0
            while data := await reader.read(_AT_ONCE):
                due = max(due, loop.time() + self._proxy.delay())
                await way.put((due, data))
            await way.put((due, b""))
            await arriving
        finally:
            arriving.cancel()

    async def _arrive(self, way: asyncio.Queue[tuple[float, bytes]], writer: StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data = await way.get()
            if (early := due - loop.time()) > 0:
                await asyncio.sleep(early)
            if self.is_silent:
                if not data:
                    await self._over.wait()  # nobody is told of the end
                    return
                continue
            if not data:
                writer.write_eof()
                return
            await self._write(writer, data)

    async def _write(self, writer: StreamWriter, data: bytes) -> None:
        weather = self._proxy.weather
        for at in range(0, len(data), weather.piece_bytes):
            piece = data[at : at + weather.piece_bytes]
            writer.write(piece)
            await writer.drain()
            if weather != CLEAR:
                await asyncio.sleep(len(piece) / weather.bytes_per_second)


def _reset(writer: StreamWriter) -> None:
    line = writer.get_extra_info("socket")
    if line is not None and line.family != socket.AF_UNIX:
        with suppress(OSError):
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()


def to_postgres(url: str) -> Connect:
    """A server on a Unix socket."""
    parts = conninfo_to_dict(url)
    path = f"{parts['host']}/.s.PGSQL.{parts.get('port', 5432)}"
    return lambda: asyncio.open_unix_connection(path)


def url_through(proxy: "Proxy", url: str) -> str:
    parts = conninfo_to_dict(url)
    return f"postgresql://{parts['user']}@127.0.0.1:{proxy.port}/{parts['dbname']}"


@asynccontextmanager
async def a_proxy(connect: Connect, seed: str = "") -> AsyncIterator[Proxy]:
    proxy = Proxy(connect, Random(seed))
    server = await asyncio.start_server(proxy.take, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        proxy.reset()
