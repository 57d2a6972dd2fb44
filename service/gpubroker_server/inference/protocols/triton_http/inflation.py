"""Checks the inflated size of compressed bodies, because a few kilobytes may become gigabytes inside Triton.
The body is passed on compressed, as it came: each piece follows once its inflated size is known."""

import asyncio
import zlib
from collections.abc import Sequence
from typing import Final, Protocol

from gpubroker_server.http.problems import Problem

ENCODINGS: Final = frozenset({b"gzip", b"deflate"})
"""The values of Content-Encoding that Triton inflates."""

_GZIP_OR_ZLIB: Final = 32 + zlib.MAX_WBITS
"""The window bits for zlib. Adding 32 makes zlib recognize the header of either format."""
_STEP_BYTES: Final = 1024 * 1024
"""The most bytes that are inflated at once. This bounds the memory that a check takes."""


def inflating(encodings: Sequence[bytes]) -> bytes:
    """Return the values of the header Content-Encoding, joined, if Triton might inflate one of them. Returns
    no bytes otherwise: Triton itself refuses other encodings."""
    joined = b", ".join(encoding for encoding in encodings if encoding != b"identity")
    return joined if any(encoding in joined for encoding in ENCODINGS) else b""


class Sink(Protocol):
    """The request whose body is checked."""

    @property
    def is_over(self) -> bool: ...

    def check_inflated(self, body_bytes: int) -> None:
        """Check the size of a body after decompression. Raises Problem if it is too large."""
        ...

    def write(self, data: bytes) -> None: ...

    def flush(self) -> None: ...

    def on_inflated(self, fault: Problem | None) -> None:
        """Continue, because all pieces that have come have been passed on; or refuse the body because of the
        fault."""
        ...


class Inflation:
    """Passes a compressed body on to a sink, piece by piece, after counting the inflated bytes of each piece.
    The bytes are counted in a thread, because one piece may take a second to inflate."""

    def __init__(self, sink: Sink, encoding: bytes, most_bytes: int) -> None:
        self.has_ended = False
        """True once all of the body has come."""
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
        """Note that all of the body has come. Returns True if all of it has been passed on; otherwise the
        sink's `on_inflated` will be called."""
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
    """Counts the inflated bytes of a body and keeps none of them."""

    def __init__(self, most_bytes: int) -> None:
        self.total_bytes = 0
        """The number of inflated bytes. Once this exceeds `most_bytes`, the rest of the body is not
        inflated."""
        self._most_bytes = most_bytes
        self._member = zlib.decompressobj(_GZIP_OR_ZLIB)

    def add(self, data: bytes) -> None:
        """Count the next bytes of the body. Raises zlib.error."""
        while data and self.total_bytes <= self._most_bytes:
            # A gzip body may consist of several members, one after the other.
            if self._member.eof:
                self._member = zlib.decompressobj(_GZIP_OR_ZLIB)
            self.total_bytes += len(self._member.decompress(data, _STEP_BYTES))
            data = self._member.unused_data or self._member.unconsumed_tail


def bad_encoding(encoding: bytes) -> Problem:
    return Problem(
        "unsupported-media-type",
        f'Content-Encoding is "{encoding.decode("latin-1")[:40]}"; send gzip or deflate',
    )


def not_encoded(encoding: bytes, fault: Exception) -> Problem:
    return Problem(
        "unsupported-media-type",
        f"Content-Encoding is {encoding.decode()}, and the body cannot be inflated: {fault}",
    )
