"""A compressed body passes as it came, each piece once it is known to how much it inflates: a few kilobytes
may become gigabytes inside Triton."""

import asyncio
import zlib
from collections.abc import Sequence
from typing import Final, Protocol

from gpubroker_server.http.problems import Problem

ENCODINGS: Final = frozenset({b"gzip", b"deflate"})
"""That Triton reads."""

_GZIP_OR_ZLIB: Final = 32 + zlib.MAX_WBITS
_STEP_BYTES: Final = 1024 * 1024


def inflating(encodings: Sequence[bytes]) -> bytes:
    """The values of the header, if Triton might inflate one of them. It refuses others itself."""
    together = b", ".join(encoding for encoding in encodings if encoding != b"identity")
    return together if any(encoding in together for encoding in ENCODINGS) else b""


class Sink(Protocol):
    """The request."""

    @property
    def is_over(self) -> bool: ...

    def check_inflated(self, body_bytes: int) -> None:
        """Check the size of a body after decompression. Raises Problem if it is too large."""
        ...

    def write(self, data: bytes) -> None: ...

    def flush(self) -> None: ...

    def on_inflated(self, fault: Problem | None) -> None:
        """All that has come is passed on, or the body is refused."""
        ...


class Inflation:
    """Counts in a thread: a piece may inflate to so much that it takes a second."""

    def __init__(self, sink: Sink, encoding: bytes, most_bytes: int) -> None:
        self.has_ended = False
        """All of the body has come."""
        self._sink = sink
        self._encoding = encoding
        self._size = InflatedSize(most_bytes)
        self._pieces: list[bytes] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        return self._task is not None

    def add(self, data: bytes) -> None:
        self._pieces.append(data)
        if self._task is None:
            self._task = asyncio.ensure_future(self._pass_on())

    def end(self) -> bool:
        """The body has come. Whether all of it is passed on, or `on_inflated` will be called."""
        self.has_ended = True
        return self._task is None

    async def _pass_on(self) -> None:
        sink, fault = self._sink, None
        try:
            while self._pieces and not sink.is_over:
                data = self._pieces.pop(0)
                await asyncio.to_thread(self._size.add, data)
                sink.check_inflated(self._size.total_bytes)
                sink.write(data)
                sink.flush()
        except zlib.error as error:
            fault = not_encoded(self._encoding, error)
        except Problem as problem:
            fault = problem
        self._task = None
        if not sink.is_over:
            sink.on_inflated(fault)


class InflatedSize:
    """Counts, and keeps nothing."""

    def __init__(self, most_bytes: int) -> None:
        self.total_bytes = 0
        """More than `most_bytes` as soon as it is known to be more: the rest is not looked at."""
        self._most_bytes = most_bytes
        self._member = zlib.decompressobj(_GZIP_OR_ZLIB)

    def add(self, data: bytes) -> None:
        """The next bytes of the body. Raises zlib.error."""
        while data and self.total_bytes <= self._most_bytes:
            if self._member.eof:  # of one of several members
                self._member = zlib.decompressobj(_GZIP_OR_ZLIB)
            self.total_bytes += len(self._member.decompress(data, _STEP_BYTES))
            data = self._member.unused_data or self._member.unconsumed_tail


def bad_encoding(encoding: bytes) -> Problem:
    return Problem(
        "unsupported-media-type",
        f'Content-Encoding is "{encoding.decode("latin-1")[:40]}"; give one of gzip and deflate',
    )


def not_encoded(encoding: bytes, fault: Exception) -> Problem:
    return Problem(
        "unsupported-media-type",
        f"Content-Encoding is {encoding.decode()}, and the body cannot be inflated: {fault}",
    )
