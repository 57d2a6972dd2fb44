"""Wake-ups between processes on one PostgreSQL: a word that something was committed, and nothing more.

Who gets none finds out by asking. A notification has a transaction of its own: in that of a commit, it would
hold a lock of the whole server until the commit is on disk. A leader that lets its term go, which is rare,
says so in the transaction that does it: nobody looks too early, and no word is lost with a process that ends.
"""

import asyncio
import os
from asyncio import Future, TimerHandle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg

PAUSE_SECONDS = 0.01
"""After quiet a word is sent at once; then those of so long are one."""

RECONNECT_SECONDS = 1.0

LOOK_SECONDS = 2.0
"""So often the server is asked whether it is still there: who only listens hears of no end of a line on which
nothing passes."""

_CHANNEL = "gpubroker"
_RESIGNED = "resigned"
TELL_RESIGNED = f"NOTIFY {_CHANNEL}, '{_RESIGNED}'"


class Hints:
    """One connection that listens and notifies. Lives on the event loop, but for connecting."""

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]]) -> None:
        self._connect = connect
        self._connection: psycopg.Connection[Any] | None = None
        self._lost: Future[None]
        """That of the connection which there is."""
        self._timer: TimerHandle | None = None
        self._sent_at = 0.0
        self._asked_at = 0.0

    async def keep(self, on_hint: Callable[[], None], on_resigned: Callable[[], None]) -> None:
        """Listen until cancelled; connect again when the server was away. `on_resigned`: called as well when
        a leader has let its term go."""
        while True:
            with suppress(psycopg.Error):
                await self._listen(on_hint, on_resigned)
            await asyncio.sleep(RECONNECT_SECONDS)

    def send(self) -> None:
        """Tell the others soon. Returns at once, whether they can be told or not."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._sent_at + PAUSE_SECONDS), self._notify)

    async def _listen(self, on_hint: Callable[[], None], on_resigned: Callable[[], None]) -> None:
        connection = await self._opened()
        loop = asyncio.get_running_loop()
        self._connection, self._lost = connection, loop.create_future()
        # Of our own: the library closes its own when the server hangs up, and the loop still watches it.
        socket = os.dup(connection.fileno())
        loop.add_reader(socket, self._read, connection.pgconn, on_hint, on_resigned)
        try:
            on_hint()  # whatever was said before we listened
            while not self._lost.done():
                self._ask(connection.pgconn)
                await asyncio.wait([self._lost], timeout=LOOK_SECONDS)
        finally:
            self._connection = None
            loop.remove_reader(socket)
            os.close(socket)
            connection.close()

    def _ask(self, connection: psycopg.pq.abc.PGconn) -> None:
        """Whether it is still there. What it was asked the last time it has answered by now."""
        with self._noticing_loss():
            if connection.transaction_status == psycopg.pq.TransactionStatus.IDLE:
                self._asked_at = asyncio.get_running_loop().time()
                connection.send_query(b"")
            elif asyncio.get_running_loop().time() > self._asked_at + LOOK_SECONDS / 2:
                raise psycopg.OperationalError("the server answers nothing")

    def _notify(self) -> None:
        self._timer = None
        self._sent_at = asyncio.get_running_loop().time()
        if self._connection is None:
            return
        if self._connection.pgconn.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            self.send()  # the word before is still on its way
            return
        with self._noticing_loss():
            self._asked_at = self._sent_at
            self._connection.pgconn.send_query(b"NOTIFY " + _CHANNEL.encode())

    def _read(
        self,
        connection: psycopg.pq.abc.PGconn,
        on_hint: Callable[[], None],
        on_resigned: Callable[[], None],
    ) -> None:
        is_told = has_resigned = False
        with self._noticing_loss():
            connection.consume_input()
            while not connection.is_busy() and connection.get_result() is not None:
                pass  # the answer to a word of our own
            while (word := connection.notifies()) is not None:
                is_told |= word.be_pid != connection.backend_pid
                has_resigned |= word.extra == _RESIGNED.encode()
        if is_told:
            on_hint()
        if has_resigned:
            on_resigned()

    @contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        """Any error of the connection is its end."""
        try:
            yield
        except psycopg.Error:
            if not self._lost.done():
                self._lost.set_result(None)

    async def _opened(self) -> psycopg.Connection[Any]:
        # No task: those are cancelled when the loop ends, and then nobody would close what comes of it.
        opening = asyncio.get_running_loop().run_in_executor(None, self._connect)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close)
            raise


def _close(opening: Future[psycopg.Connection[Any]]) -> None:
    """What nobody waits for any more."""
    with suppress(psycopg.Error):
        opening.result().close()
