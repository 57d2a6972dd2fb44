"""Uploads of objects, which are stored as their bytes arrive, and the ranges of downloads."""

import asyncio
import hashlib
import re
from typing import Final, NamedTuple
from uuid import uuid4

from gpubroker_server.http.problems import Problem
from gpubroker_server.ports.store import BlobStore, StoreUnavailable

PART_BYTES: Final = 1024 * 1024
"""The number of bytes that are written and read at once. A smaller object is written at once when it is
complete."""
_INLINE_BYTES: Final = 64 * 1024
"""The size in bytes above which an object is hashed on a thread."""
_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class Upload:
    """The upload of one object in parts of any size. After `discard`, only the digest is computed."""

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
        """Return the digest of the object. Call it after the last part has been added."""
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
            await self._blobs.finish(self._name, self._hash.hexdigest(), was_computed=True)
        else:
            await self._blobs.put(b"".join(self._gathered), owner=owner)
        self._blobs = None

    async def discard(self) -> None:
        """Delete what has been written of the upload, unless it is finished."""
        blobs, self._blobs = self._blobs, None
        if blobs is not None and self._passed_bytes:
            await blobs.discard(self._name)

    async def _pass_on(self) -> None:
        data = b"".join(self._gathered)
        self._gathered, self._gathered_bytes = [], 0
        hashing = asyncio.to_thread(self._hash.update, data)
        if self._blobs is None:
            await hashing
        else:
            written = self._blobs.append(self._name, self._passed_bytes, data)
            stored_bytes, _ = await asyncio.gather(written, hashing)
            if stored_bytes != self._passed_bytes + len(data):
                raise StoreUnavailable("a part of the upload was deleted while it arrived; send it again")
        self._passed_bytes += len(data)


class Span(NamedTuple):
    first_byte: int
    end_byte: int
    """The first byte that is not in the span."""

    @property
    def size_bytes(self) -> int:
        return self.end_byte - self.first_byte


def span_of(asked: str | None, size_bytes: int) -> Span | None:
    """Return the span that a Range header asks for; None if it asks for all bytes. A header that cannot be
    read asks for all bytes (RFC 9110). Raises Problem range-not-satisfiable."""
    matched = _RANGE.fullmatch(asked.strip()) if asked else None
    if matched is None or matched.groups() == ("", ""):
        return None
    first, last = matched.groups()
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
