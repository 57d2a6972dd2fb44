"""The service's side of its driver process: it starts the process, listens to it, kills it when it is
silent, and starts another one."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import structlog

from gpubroker_server.adapters.ray.head.head import (
    HEAD_ENDED,
    HeadNotStarted,
    HeadRefused,
    HeadState,
    advice,
    ray_environment,
    reach,
    running_head,
    token_file,
    why_ended,
)
from gpubroker_server.adapters.ray.options import RayOptions
from gpubroker_server.adapters.ray.processes import WatchedProcess
from gpubroker_server.adapters.ray.wire import frame, read_frame

log = structlog.get_logger("gpubroker.ray")

FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0
HEAD_PAUSE_SECONDS = 5.0
LONGEST_HEAD_PAUSE_SECONDS = 60.0
"""The longest pause before a local head is started again. Each failed start adds load, which on a busy
machine could make the next start fail too."""
CONNECT_PATIENCE_SECONDS = 90.0
"""The time after which a silent driver that is still connecting to Ray is killed. A driver gives up
connecting earlier by itself."""
PINGS = 5
"""The number of pings that a driver leaves unanswered before it is killed."""
KEEPALIVE_SECONDS = 5.0
"""The time without traffic after which Ray's connections are probed, and the time without an answer after
which they are made again. By default Ray waits for five minutes, and does not learn of new nodes
meanwhile."""
KILL_SECONDS = 5.0
LOGS = ("ray-driver.log", "ray-driver.out")
"""The file of the driver's own log lines, and that of the lines that Ray prints in the driver."""
LOG_BYTES = 4 * 2**20
DRIVER = "gpubroker_server.adapters.ray.driver.process"
ENDED = "the Ray driver process ended"


class DriverLink:
    """One driver process, from its start to its end."""

    def __init__(
        self,
        child: "subprocess.Popen[bytes]",
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        patience_seconds: float,
    ) -> None:
        self._child = child
        self._reader = reader
        self._writer = writer
        self._patience_seconds = patience_seconds
        self._connected = False
        self._heard = False
        self.fault = ENDED
        """The reason why the driver ended, as far as it is known."""

    @classmethod
    async def open(cls, options: RayOptions, address: str) -> "DriverLink":
        """Start a driver for the Ray at this address. Raises OSError."""
        own_end, driver_end = socket.socketpair()
        try:
            with driver_end:
                child = _start_driver(options, address, driver_end)
        except OSError:
            own_end.close()
            raise
        reader, writer = await asyncio.open_unix_connection(sock=own_end)
        return cls(child, reader, writer, options.driver_patience_seconds)

    def send(self, *parts: Any) -> None:
        """Send a message without waiting; it is dropped if the driver is gone. A driver that does not read
        its messages does not answer pings either, and is killed before many messages have queued up."""
        # `listen` notices the end a moment later. Until then uvloop would raise RuntimeError.
        if not self._writer.is_closing():
            self._writer.write(frame(*parts))

    async def room(self) -> None:
        """Return when the driver has read nearly all messages, or is gone."""
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def listen(self, on_message: Callable[[tuple[Any, ...]], None]) -> None:
        """Hand each message to `on_message`, and return when the driver has ended."""
        watching = asyncio.create_task(self._watch())
        try:
            while (message := await read_frame(self._reader)) is not None:
                self._heard = True
                if message[0] == "pong":
                    continue
                self._connected |= message[0] == "connected"
                self.fault = message[1] if message[0] == "trouble" else ENDED
                on_message(message)
        finally:
            watching.cancel()

    def kill(self) -> None:
        self._child.kill()
        self._writer.transport.abort()

    async def close(self) -> None:
        """Kill the driver, and return when its process has been reaped."""
        self._writer.close()
        self._child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._child.wait, KILL_SECONDS)

    async def _watch(self) -> None:
        """Kill the driver once it is silent for too long. The silence is counted in pings and not by the
        clock, because a service that was suspended finds the answers waiting for it."""
        silent_seconds = 0.0
        while silent_seconds < (self._patience_seconds if self._connected else CONNECT_PATIENCE_SECONDS):
            self._heard = False
            self.send("ping")
            await asyncio.sleep(self._patience_seconds / PINGS)
            silent_seconds = 0.0 if self._heard else silent_seconds + self._patience_seconds / PINGS
        self.fault = f"the Ray driver process did not answer for {silent_seconds:g} s and was killed"
        self.kill()


def head_pause(failed_starts: int) -> float:
    """Return the seconds to wait before a local head is started again, after this many failed starts in a
    row."""
    if not failed_starts:
        return 0.0
    return min(HEAD_PAUSE_SECONDS * 2.0 ** min(failed_starts - 1, 10), LONGEST_HEAD_PAUSE_SECONDS)


class DriverKeeper:
    """Starts one driver process after another, and a local head for it if no address is given."""

    def __init__(
        self,
        options: RayOptions,
        term: Callable[[], tuple[int, int]],
        on_message: Callable[[tuple[Any, ...]], None],
        on_end: Callable[[str, bool], bool],
    ) -> None:
        """`term` returns the lineage and the term; the term is 0 while another process leads. `on_end` is
        called with the reason why the driver ended and True if the local head ended too; it returns True if
        a node agent had answered."""
        self.address = options.address or ""
        self._options = options
        self._term = term
        self._on_message = on_message
        self._on_end = on_end
        self._broker = uuid4().hex
        self._driver: DriverLink | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._finding: asyncio.Future[HeadState] | None = None
        self._failed_starts = 0
        """The number of starts of a local head that failed in a row."""

    @property
    def has_driver(self) -> bool:
        return self._driver is not None

    def begin(self) -> None:
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep())

    def send(self, *parts: Any) -> None:
        """Send a message to the driver, if there is one."""
        if self._driver is not None:
            self._driver.send(*parts)

    async def room(self) -> None:
        """Return when the driver has read nearly all messages, or at once if there is no driver."""
        if self._driver is not None:
            await self._driver.room()

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._finding is not None:
            await asyncio.gather(self._finding, return_exceptions=True)

    async def _keep(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            head_ended = False
            try:
                fault, head_ended = await self._drive(await self._find_head())
                log.warning("no Ray driver process; starting another", fault=fault)
            except (HeadRefused, OSError) as refused:
                fault = advice(refused, self._options)
                log.error("Ray cannot be reached; trying again", fault=fault)
            except Exception as error:
                fault = repr(error)
                log.exception("the Ray driver process is given up; starting another")
            was_of_use = self._on_end(fault, head_ended)
            pause = FIRST_PAUSE_SECONDS if was_of_use else min(2 * pause, LONGEST_PAUSE_SECONDS)
            await asyncio.sleep(max(pause, head_pause(self._failed_starts)))

    async def _find_head(self) -> HeadState | None:
        """Return the local head, which is started if need be; None if an address is configured and answers.
        Raises HeadRefused and OSError.

        `close` does not cancel the search, because a local head that no process knows of would stay behind.
        """
        if not self._options.is_local:
            await reach(self.address)
            return None
        search = running_head(self._options, chooses_ports=self._failed_starts > 0)
        self._finding = asyncio.ensure_future(search)
        try:
            head = await asyncio.shield(self._finding)
        except HeadNotStarted:
            self._failed_starts += 1
            raise
        self._failed_starts = 0
        if head.dashboard and self.address != head.address:
            token = token_file(self._options.data_dir)
            log.info(f"Ray's dashboard is at http://{head.dashboard}; it asks for the token in {token}")
        self.address = head.address
        return head

    async def _drive(self, head: HeadState | None) -> tuple[str, bool]:
        """Run one driver until it ends. Returns the reason, and True if the local head ended and the driver
        with it."""
        driver = await DriverLink.open(self._options, self.address)
        watched = None
        try:
            watched = WatchedProcess(head.process, driver.kill) if head is not None else None
            self._driver = driver
            driver.send(*self._opening(head))
            await driver.listen(self._on_message)
            head_ended = watched is not None and watched.ended
            return (why_ended(self._options.data_dir) if head_ended else driver.fault), head_ended
        except ProcessLookupError:
            return HEAD_ENDED, False
        finally:
            self._driver = None
            if watched is not None:
                watched.close()
            await driver.close()

    def _opening(self, head: HeadState | None) -> tuple[Any, ...]:
        options = self._options
        config = options.agent_config(str(head.keepalive) if head is not None else "").to_json()
        local_node = options.node_name if options.is_local else ""
        about = self.address, local_node, config, self._broker
        return *about, *self._term(), options.result_limit_bytes


def _start_driver(options: RayOptions, address: str, channel: socket.socket) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "RAY_ADDRESS": address}
    lines, printed = (_log_of(options.data_dir, name) for name in LOGS)
    with lines.open("ab") as log_file, printed.open("ab") as output:
        descriptors = channel.fileno(), log_file.fileno()
        about = *map(str, descriptors), options.log_level, options.log_format
        return subprocess.Popen(  # noqa: S603  # our own module
            [sys.executable, "-m", DRIVER, *about],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=_keepalive() | environment | ray_environment(options),
            pass_fds=descriptors,
            start_new_session=True,
        )


def _keepalive() -> dict[str, str]:
    """Return the environment variables for Ray's keepalive. Values that the operator has set override
    them."""
    milliseconds = str(int(1000 * KEEPALIVE_SECONDS))
    names = ("RAY_grpc_client_keepalive_time_ms", "RAY_grpc_client_keepalive_timeout_ms")
    return dict.fromkeys(names, milliseconds)


def _log_of(data_dir: Path, name: str) -> Path:
    """Return the path of a log that all drivers share. A log of more than LOG_BYTES is deleted first."""
    path = data_dir / name
    if path.exists() and path.stat().st_size > LOG_BYTES:
        path.unlink()
    return path
