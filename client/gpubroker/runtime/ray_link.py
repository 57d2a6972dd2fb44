"""The connections of rank 0 of a run to its other ranks, over which they agree when their nodes of Ray begin
and end.

Both sides prove that they know the run's token before anything else is said. A message is one line of JSON.
"""

import contextlib
import hmac
import json
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from gpubroker.runtime.task import Workers

CONNECT_SECONDS = 5.0
PAUSE_SECONDS = 0.1
"""The pause between two attempts to reach rank 0, and between two looks at the ranks at work."""
HELLO_SECONDS = 10.0
_LINE_BYTES = 4096


class WrongToken(Exception):
    """The other side does not know the token of the run."""


_NO_RANK = (OSError, ValueError, LookupError, TypeError, WrongToken)
"""The exceptions that mean that the other side is no rank of this run, or is gone."""


class RankZero:
    """Rank 0's end of all connections."""

    def __init__(self, listener: socket.socket, token: str, world: Callable[[], Workers]) -> None:
        """Begin to accept ranks. `world` returns the ranks at work, as far as this rank knows."""
        self._listener = listener
        self._token = token
        self._world = world
        self._changed = threading.Condition()
        self._address = ""
        """The address of Ray's head; empty until the head is up."""
        self._lines: dict[int, tuple[socket.socket, int]] = {}
        """The connection of each rank, and the number of the world in which the rank began. It may connect
        before this rank hears of that world."""
        self._joined: set[int] = set()
        self._is_over = False
        self._accepting = threading.Thread(target=self._accept, name="ray-link", daemon=True)
        self._accepting.start()
        threading.Thread(target=self._dismiss_leaving, name="ray-leave", daemon=True).start()

    def open(self, address: str) -> None:
        """Tell all ranks, present and future, where the head is."""
        with self._changed:
            self._address = address
            self._changed.notify_all()

    def wait_for_nodes(self, goes_on: Callable[[], bool]) -> bool:
        """Wait until each rank at work has a node in the cluster. Return False if `goes_on` returns False
        first."""
        with self._changed:
            while not {rank for rank in self._world().ranks if rank} <= self._joined:
                if not goes_on():
                    return False
                self._changed.wait(PAUSE_SECONDS)
        return True

    def end(self, *, succeeded: bool) -> None:
        """Close all connections. After a success, the ranks are told that all work is done."""
        with self._changed:
            self._is_over = True
            lines = [line for line, _number in self._lines.values()]
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # `close` alone would not wake the thread that accepts
        self._listener.close()
        for line in lines:
            with contextlib.suppress(OSError):
                if succeeded:
                    _tell(line, {"over": True})
                line.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                line, _ = self._listener.accept()
                threading.Thread(target=self._attend, args=(line,), name="ray-rank", daemon=True).start()

    def _attend(self, line: socket.socket) -> None:
        with line, contextlib.suppress(*_NO_RANK):
            line.settimeout(HELLO_SECONDS)
            rank, number = _admit(line, self._token)
            line.settimeout(None)
            with self._changed:
                self._lines[rank] = line, number
                self._changed.wait_for(lambda: self._address or self._is_over)
            if not self._address:
                return
            _tell(line, {"address": self._address})
            for said in _heard(line):
                if said.get("joined"):
                    with self._changed:
                        self._joined.add(rank)
                        self._changed.notify_all()

    def _dismiss_leaving(self) -> None:
        """Let the nodes of ranks that are told to leave end, until all is over."""
        while True:
            with self._changed:
                if self._is_over:
                    return
                world = self._world()
                leaving = [
                    rank
                    for rank, (_line, number) in self._lines.items()
                    if number <= world.number and rank not in world.ranks
                ]
                lines = [self._lines.pop(rank)[0] for rank in leaving]
                self._changed.wait(PAUSE_SECONDS if not lines else 0)
            for line in lines:
                with contextlib.suppress(OSError):
                    _tell(line, {"leave": True})


class OtherRank:
    """The end of a rank above 0."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._begun = b""
        self.end = ""
        """`over` if the work is done, `leave` if this rank is no longer wanted, `lost` if rank 0 is gone;
        empty until one of them is known."""

    @classmethod
    def connect(
        cls, address: str, token: str, rank: int, number: int, goes_on: Callable[[], bool]
    ) -> "OtherRank | None":
        """Connect to rank 0, and try again until it answers. Return None if `goes_on` returns False first.
        `number` is the number of the world in which this rank begins."""
        host, _, port = address.rpartition(":")
        while goes_on():
            with contextlib.suppress(*_NO_RANK):
                line = socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS)
                try:
                    _introduce(line, token, rank, number)
                    line.settimeout(None)
                    return cls(line)
                except BaseException:
                    line.close()
                    raise
            time.sleep(PAUSE_SECONDS)
        return None

    def fileno(self) -> int:
        return self._line.fileno()

    def head(self, goes_on: Callable[[], bool]) -> str:
        """Wait for the address of Ray's head, and return it. Return an empty text if `goes_on` returns False
        first, or if rank 0 is gone."""
        ready = select.poll()
        ready.register(self._line, select.POLLIN)
        while goes_on() and not self.end:
            if ready.poll(PAUSE_SECONDS * 1000):
                for said in self.hear():
                    if address := said.get("address"):
                        return str(address)
        return ""

    def joined(self) -> None:
        with contextlib.suppress(OSError):
            _tell(self._line, {"joined": True})

    def hear(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived, without those that set `end`. Call it when the connection is
        readable."""
        try:
            data = self._line.recv(_LINE_BYTES)
        except OSError:
            data = b""
        if not data:
            self.end = self.end or "lost"
        *lines, self._begun = (self._begun + data).split(b"\n")
        messages = [json.loads(line) for line in lines]
        for end in ("over", "leave"):
            if not self.end and any(message.get(end) for message in messages):
                self.end = end
        return messages


def _introduce(line: socket.socket, token: str, rank: int, number: int) -> None:
    """Prove to rank 0 that this is a rank of the same run, and have it prove the same. Raises WrongToken,
    ValueError and OSError."""
    question = _read_line(line)["question"]
    own = secrets.token_hex(16)
    answer = _proof(token, f"rank {rank}", question)
    _tell(line, {"rank": rank, "world": number, "answer": answer, "question": own})
    if not hmac.compare_digest(str(_read_line(line)["answer"]), _proof(token, "rank 0", own)):
        raise WrongToken


def _admit(line: socket.socket, token: str) -> tuple[int, int]:
    """Return the number of the rank that has connected, and that of the world in which it begins. Raises
    WrongToken, ValueError and OSError."""
    question = secrets.token_hex(16)
    _tell(line, {"question": question})
    said = _read_line(line)
    rank = int(said["rank"])
    if not hmac.compare_digest(str(said["answer"]), _proof(token, f"rank {rank}", question)):
        raise WrongToken
    _tell(line, {"answer": _proof(token, "rank 0", str(said["question"]))})
    return rank, int(said["world"])


def _proof(token: str, who: str, question: str) -> str:
    return hmac.new(token.encode(), f"{who} {question}".encode(), "sha256").hexdigest()


def _tell(line: socket.socket, message: dict[str, Any]) -> None:
    line.sendall(json.dumps(message).encode() + b"\n")


def _read_line(line: socket.socket) -> dict[str, Any]:
    """Read one message, byte by byte, so that nothing of the next one is taken. Raises ValueError."""
    data = b""
    while not data.endswith(b"\n"):
        byte = line.recv(1)
        if not byte or len(data) > _LINE_BYTES:
            raise ValueError("no message")
        data += byte
    message = json.loads(data)
    if not isinstance(message, dict):
        raise WrongToken
    return message


def _heard(line: socket.socket) -> Iterator[dict[str, Any]]:
    """Yield the messages of the other side until it closes the connection."""
    with contextlib.suppress(OSError, ValueError):
        while True:
            yield _read_line(line)
