"""The service's end of the conversation with its driver process, which is killed when it falls silent."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpubroker_server.adapters.ray.frames import frame, read_frame
from gpubroker_server.adapters.ray.head.head import ray_environment
from gpubroker_server.adapters.ray.options import RayOptions

CONNECT_PATIENCE_SECONDS = 90.0
"""A driver that connects to Ray gives up by itself after less."""
LOOKS = 5
"""How often it is asked within its patience."""
KEEPALIVE_SECONDS = 5.0
"""A line of the driver on which nothing came for so long is asked whether it is there, and after as long
again made anew. Ray itself would wait for five minutes, and hear of no new node meanwhile."""
KILL_SECONDS = 5.0
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
        """Why it ended, as far as it is known."""

    @classmethod
    async def open(cls, options: RayOptions) -> "DriverLink":
        """Start a driver. Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                child = _start_driver(options, theirs)
        except OSError:
            ours.close()
            raise
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(child, reader, writer, options.driver_patience_seconds)

    def tell(self, *parts: Any) -> None:
        """Never waits: a driver that takes nothing is silent as well, and gone before much has gathered."""
        self._writer.write(frame(*parts))

    async def listen(self, on_message: Callable[[tuple[Any, ...]], None]) -> None:
        """Back when the driver has ended."""
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
        """Back when the process is buried."""
        self._writer.close()
        self._child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._child.wait, KILL_SECONDS)

    async def _watch(self) -> None:
        """Counts looks, not the clock: a service that slept itself finds the answers waiting for it."""
        silent_seconds = 0.0
        while silent_seconds < (self._patience_seconds if self._connected else CONNECT_PATIENCE_SECONDS):
            self._heard = False
            self.tell("ping")
            await asyncio.sleep(self._patience_seconds / LOOKS)
            silent_seconds = 0.0 if self._heard else silent_seconds + self._patience_seconds / LOOKS
        self.fault = f"the Ray driver process did not answer for {silent_seconds:g} s and was killed"
        self.kill()


def _start_driver(options: RayOptions, channel: socket.socket) -> "subprocess.Popen[bytes]":
    environment = {name: text for name, text in os.environ.items() if name != "RAY_ADDRESS"}
    with _log_of(options.data_dir).open("ab") as output:
        return subprocess.Popen(  # noqa: S603  # our own module
            [sys.executable, "-m", DRIVER, str(channel.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=_keepalive() | environment | ray_environment(options),
            pass_fds=(channel.fileno(),),
            start_new_session=True,
        )


def _keepalive() -> dict[str, str]:
    """The operator's own choice goes before it."""
    milliseconds = str(int(1000 * KEEPALIVE_SECONDS))
    names = ("RAY_grpc_client_keepalive_time_ms", "RAY_grpc_client_keepalive_timeout_ms")
    return dict.fromkeys(names, milliseconds)


def _log_of(data_dir: Path) -> Path:
    """Where drivers write; begun anew when it has grown large."""
    path = data_dir / "ray-driver.log"
    if path.exists() and path.stat().st_size > LOG_BYTES:
        path.unlink()
    return path
