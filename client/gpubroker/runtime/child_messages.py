"""Messages between the process of a run and the process in which another interpreter carries the run out.

Each message is its length, then a pickle of plain values. Nothing else is unpickled, whatever was sent.
"""

import io
import pickle
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

_LENGTH = struct.Struct(">Q")
_PICKLE_PROTOCOL = 4
"""The newest form of pickles that all Pythons of environments read."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse everything but built-in values. Always raises UnpicklingError."""
        raise pickle.UnpicklingError(f"{module}.{name} is no plain value")


class Messages:
    """Sends and receives messages over a connected socket. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, *message: Any) -> None:
        """Send a message of plain values. Raises OSError if the other process is gone."""
        data = pickle.dumps(message, _PICKLE_PROTOCOL)
        with self._lock:
            self._connection.sendall(_LENGTH.pack(len(data)))
            self._connection.sendall(data)

    def received(self) -> Iterator[tuple[Any, ...]]:
        """Yield messages until the other process is gone or has sent something that is no message."""
        with self._connection.makefile("rb") as stream:
            while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
                (length,) = _LENGTH.unpack(head)
                data = stream.read(length)
                if len(data) < length:
                    return
                try:
                    message = _PlainUnpickler(io.BytesIO(data)).load()
                except (pickle.UnpicklingError, EOFError, ValueError, IndexError):
                    return
                if not isinstance(message, tuple) or not message:
                    return
                yield message
