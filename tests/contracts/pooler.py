"""A pooler that hands connections out by transaction: each transaction of a client gets another one."""

import asyncio
import struct
import tempfile
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

BACKENDS = 3
ASKS = frozenset({b"Q", b"S"})
"""Query and Sync: each is answered by one ReadyForQuery, which says whether a transaction is open."""
READY, IDLE = b"Z", b"I"
BROKEN = (asyncio.IncompleteReadError, ConnectionError)


class Client:
    """One client and its backends, which nobody else uses: what one of them keeps, the next one lacks."""

    def __init__(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._open = [writer]
        self._asked = 0
        """So many answers are to come."""
        self._is_between = True
        """The client has said nothing since it last asked, and no transaction is open."""

    async def serve(self, target: str) -> None:
        with suppress(*BROKEN, asyncio.CancelledError):  # cancelled: the test is over
            size = await self._reader.readexactly(4)
            startup = size + await self._reader.readexactly(struct.unpack("!I", size)[0] - 4)
            backends = [await self._backend(startup, target) for _ in range(BACKENDS)]
            self._writer.write(backends[0][2])
            jobs = [asyncio.create_task(self._answer(there)) for there, _, _ in backends]
            jobs.append(asyncio.create_task(self._ask([back for _, back, _ in backends])))
            await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)  # whoever hangs up ends it all
            for job in jobs:
                job.cancel()
        for writer in self._open:
            writer.close()

    async def _backend(self, startup: bytes, target: str) -> tuple[StreamReader, StreamWriter, bytes]:
        """With what the server says up to its first ReadyForQuery."""
        reader, writer = await asyncio.open_unix_connection(target)
        self._open.append(writer)
        writer.write(startup)
        said, kind = b"", b""
        while kind != READY:
            kind, message = await _message(reader)
            said += message
        return reader, writer, said

    async def _ask(self, backends: list[StreamWriter]) -> None:
        turn = 0
        with suppress(*BROKEN):
            while True:
                kind, message = await _message(self._reader)
                if self._is_between and not self._asked:
                    turn += 1
                self._is_between = False
                self._asked += kind in ASKS
                backends[turn % len(backends)].write(message)

    async def _answer(self, there: StreamReader) -> None:
        with suppress(*BROKEN):
            while True:
                kind, message = await _message(there)
                if kind == READY:
                    self._asked -= 1
                    self._is_between = message.endswith(IDLE)
                self._writer.write(message)


async def _message(reader: StreamReader) -> tuple[bytes, bytes]:
    """Kind, and the whole of it."""
    head = await reader.readexactly(5)
    return head[:1], head + await reader.readexactly(struct.unpack("!I", head[1:])[0] - 4)


@asynccontextmanager
async def a_pooler(url: str) -> AsyncIterator[str]:
    """The URL by which a database is reached through it."""
    given = conninfo_to_dict(url)
    target = f"{given['host']}/.s.PGSQL.{given.get('port', 5432)}"
    with tempfile.TemporaryDirectory(prefix="gpb-pool-") as folder:

        async def serve(reader: StreamReader, writer: StreamWriter) -> None:
            await Client(reader, writer).serve(target)

        server = await asyncio.start_unix_server(serve, Path(folder) / ".s.PGSQL.5432")
        yield f"postgresql://{given['user']}@/{given['dbname']}?host={folder}"
        server.close()
