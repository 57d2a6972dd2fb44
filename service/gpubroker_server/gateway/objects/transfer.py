"""Bytes of objects on their way: uploads that are stored as they come, and parts of downloads."""

import asyncio
import hashlib
import re
from typing import Final, NamedTuple
from uuid import uuid4

from gpubroker_server.http.problems import Problem
from gpubroker_server.ports.store import BlobStore

PART_BYTES: Final = 1024 * 1024
"""Number of bytes that are written and read at once. A smaller object is never in parts."""
_INLINE_BYTES: Final = 64 * 1024
"""Size above which objects are hashed on a thread."""
_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class Upload:
    """One object that comes in parts of any size. Once it is discarded its digest alone is found out."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs: BlobStore | None = blobs
        self._name = f"upload-{uuid4().hex}"
        self._hash = hashlib.sha256()
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self._passed_bytes = 0

    @property
    def size_bytes(self) -> int:
        return self._passed_bytes + self._gathered_bytes

    @property
    def is_written(self) -> bool:
        return self._blobs is not None

    async def add(self, part: bytes) -> None:
        self._gathered.append(part)
        self._gathered_bytes += len(part)
        if self._gathered_bytes > PART_BYTES:
            await self._pass_on()

    async def digest(self) -> str:
        """Nothing is added any more."""
        if self._passed_bytes:
            await self._pass_on()
            return self._hash.hexdigest()
        data = b"".join(self._gathered)
        if len(data) <= _INLINE_BYTES:
            return hashlib.sha256(data).hexdigest()
        return await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())

    async def finish(self, owner: str) -> None:
        """Finish the upload. The object is durable when this returns."""
        if self._blobs is None:
            return
        if self._passed_bytes:
            await self._blobs.finish(self._name, self._hash.hexdigest())
        else:
            await self._blobs.put(b"".join(self._gathered), owner=owner)
        self._blobs = None

    async def discard(self) -> None:
        """Nothing of it stays unless it is finished."""
        blobs, self._blobs = self._blobs, None
        if blobs is not None and self._passed_bytes:
            await blobs.discard(self._name)

    async def _pass_on(self) -> None:
        data = b"".join(self._gathered)
        self._gathered, self._gathered_bytes = [], 0
        await asyncio.to_thread(self._hash.update, data)
        if self._blobs is not None:
            await self._blobs.append(self._name, self._passed_bytes, data)
        self._passed_bytes += len(data)


class Span(NamedTuple):
    first_byte: int
    end_byte: int
    """The first byte that is not in the span."""

    @property
    def size_bytes(self) -> int:
        return self.end_byte - self.first_byte


def span_of(asked: str | None, size_bytes: int) -> Span | None:
    """Return what a `Range` asks for; None: all. As RFC 9110 has it, one that cannot be read asks for all.
    Raises Problem range-not-satisfiable."""
    found = _RANGE.fullmatch(asked.strip()) if asked else None
    if found is None or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    if not first:
        span = Span(max(0, size_bytes - int(last)), size_bytes)
    elif last and int(last) < int(first):
        return None
    else:
        span = Span(int(first), min(size_bytes, int(last) + 1) if last else size_bytes)
    if span.size_bytes <= 0:
        detail = f"the object has {size_bytes} bytes, and the range {asked} has none of them"
        raise Problem("range-not-satisfiable", detail, headers={"Content-Range": f"bytes */{size_bytes}"})
    return span
