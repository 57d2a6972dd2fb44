"""A BlobStore in memory."""

import hashlib

from gpubroker_server.ports.store import BlobCorrupt, BlobMissing


class Blobs:
    """Objects in memory, by digest."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, bytearray] = {}
        self.most_bytes = 0
        """Of all uploads together, at any time."""

    async def put(self, data: bytes, *, owner: str) -> str:
        digest = hashlib.sha256(data).hexdigest()
        self.objects[digest] = data
        return digest

    async def get(self, digest: str) -> bytes:
        data = self.objects.get(digest)
        if data is None or hashlib.sha256(data).hexdigest() != digest:
            raise BlobMissing(digest) if data is None else BlobCorrupt(digest)
        return data

    async def read(self, digest: str, first_byte: int, most_bytes: int) -> bytes:
        if digest not in self.objects:
            raise BlobMissing(digest)
        return self.objects[digest][first_byte : first_byte + most_bytes]

    async def append(self, upload: str, first_byte: int, data: bytes) -> int:
        there = self.uploads.setdefault(upload, bytearray())
        if first_byte == 0:
            there.clear()
        if len(there) == first_byte:
            there += data
            self.most_bytes = max(self.most_bytes, sum(map(len, self.uploads.values())))
        return len(there)

    async def finish(self, upload: str, digest: str, *, was_computed: bool = False) -> None:
        data = bytes(self.uploads.pop(upload))
        if hashlib.sha256(data).hexdigest() != digest:
            raise BlobCorrupt(digest)
        await self.put(data, owner=upload)

    async def discard(self, upload: str) -> None:
        self.uploads.pop(upload, None)

    async def delete(self, digest: str) -> None:
        self.objects.pop(digest, None)
