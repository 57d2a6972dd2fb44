"""Blobs as files below one directory. The path of a file is `ab/cd/abcd…`, after the sha256 of its bytes."""

import asyncio
import errno
import hashlib
import os
import re
import stat
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from gpubroker_server.core.domain.limits import ServiceLimits
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.ports.store import (
    BlobCorrupt,
    BlobMissing,
    BlobTooLarge,
    StoreExhausted,
    StoreUnavailable,
)

log = structlog.get_logger("gpubroker.blobs")

_DIGEST_LENGTH = 64
_MAX_BYTES = ServiceLimits().result_bytes
_ASKED_AT_ONCE = 500
_UPLOAD = re.compile("[A-Za-z0-9_-]{1,200}")
_PUT_AGAIN = 0o400
"""The mode of a file that was put more than once. Rows that are not committed yet may name it."""

Referenced = Callable[[Sequence[str]], Awaitable[Collection[str]]]
"""Returns those of the given digests that a row names."""


class DirectoryBlobs:
    """A BlobStore. Under the name of a blob there is either a complete and synced file or none."""

    def __init__(self, root: Path, max_bytes: int = _MAX_BYTES) -> None:
        self._root = root
        self._max_bytes = max_bytes

    async def put(self, data: bytes, *, owner: str) -> str:
        if len(data) > self._max_bytes:
            raise BlobTooLarge(
                f"{owner} gave an object of {len(data)} bytes; at most {self._max_bytes} bytes are kept"
            )
        with self._reachable("written"):
            return await asyncio.to_thread(self.put_now, data)

    async def get(self, digest: str) -> bytes:
        with self._reachable("read"):
            return await asyncio.to_thread(self.get_now, digest)

    async def read(self, digest: str, first_byte: int, most_bytes: int) -> bytes:
        path = self._path(digest)

        def read_now() -> bytes:
            with path.open("rb") as file:
                file.seek(first_byte)
                return file.read(most_bytes)

        with self._reachable("read"):
            try:
                return await asyncio.to_thread(read_now)
            except FileNotFoundError:
                raise BlobMissing(f"no object has the digest {digest}") from None

    async def append(self, upload: str, first_byte: int, data: bytes) -> int:
        if first_byte + len(data) > self._max_bytes:
            raise BlobTooLarge(f"an object has more than {self._max_bytes} bytes; no more are kept")
        with self._reachable("written"):
            return await asyncio.to_thread(self._append_now, self._upload(upload), first_byte, data)

    async def finish(self, upload: str, digest: str, *, was_computed: bool = False) -> None:
        with self._reachable("written"):
            try:
                await asyncio.to_thread(self._finish_now, self._upload(upload), digest, was_computed)
            except FileNotFoundError:
                raise BlobMissing(f"no upload has the name {upload}") from None

    async def discard(self, upload: str) -> None:
        """Delete the parts of an upload, if there are any."""
        path = self._upload(upload)
        with self._reachable("deleted"):
            await asyncio.to_thread(path.unlink, missing_ok=True)

    async def delete(self, digest: str) -> None:
        """Delete the blob if it was put only once, so that no other row that names it can be on its way."""
        path = self._path(digest)
        with self._reachable("deleted"):
            await asyncio.to_thread(self._drop, path, _was_put_once)

    @contextmanager
    def _reachable(self, action: str) -> Iterator[None]:
        """Turn an OSError into StoreUnavailable: a full disk, a lost mount or missing access may be
        temporary, so the caller may try again."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreExhausted(f"disk full: {self._root}") from error
            raise StoreUnavailable(
                f"an object below {self._root} cannot be {action}: {error.strerror}; "
                "make room, or give this user access"
            ) from error

    async def keep_clean(
        self,
        referenced: Referenced,
        may_prune: Callable[[], bool],
        *,
        every_seconds: Seconds = Seconds(900.0),
        age_seconds: Seconds = Seconds(3600.0),
    ) -> None:
        """Sweep at intervals until cancelled. Nothing is swept while the database or the disk cannot be
        reached.

        `may_prune` returns True if this machine's wall clock can be trusted for the age of files. After a
        jump ahead, files whose rows are not committed yet would count as old.
        """
        while True:
            await asyncio.sleep(every_seconds)
            if not may_prune():
                continue
            try:
                await self.sweep(referenced, age_seconds=age_seconds)
            except (StoreUnavailable, OSError) as fault:
                log.warning("objects not swept; trying again later", fault=str(fault))

    async def sweep(self, referenced: Referenced, *, age_seconds: Seconds) -> int:
        """Delete blobs that no row names and that were put at least `age_seconds` ago. Returns their number.

        The row of a younger blob may not be committed yet. A file that cannot be deleted is skipped.
        """
        before = time.time() - age_seconds

        def is_old(file: os.stat_result) -> bool:
            return file.st_mtime <= before

        old = await asyncio.to_thread(lambda: list(self._older_than(before)))
        deleted = 0
        for start in range(0, len(old), _ASKED_AT_ONCE):
            digests = old[start : start + _ASKED_AT_ONCE]
            needed = await referenced(digests)
            for digest in set(digests) - set(needed):
                with _skipping_faults(digest):
                    deleted += await asyncio.to_thread(self._drop, self._path(digest), is_old)
        return deleted

    def _older_than(self, before: float) -> Iterator[str]:
        for path in self._root.glob("??/??/*"):
            with _skipping_faults(path.name):
                if path.stat().st_mtime <= before:
                    if len(path.name) == _DIGEST_LENGTH and not path.name.startswith("."):
                        yield path.name
                    else:
                        path.unlink()  # the file is left from an interrupted write

    def _drop(self, path: Path, may_go: Callable[[os.stat_result], bool]) -> bool:
        """Delete a file if `may_go` allows it, and return True if it was deleted. The file is renamed first
        and checked again: if it was put again meanwhile, it is renamed back."""
        moved_path = path.with_name(f".old-{path.name}")
        try:
            if not may_go(path.stat()):
                return False
            os.rename(path, moved_path)
        except FileNotFoundError:
            return False
        if not may_go(moved_path.stat()):
            os.rename(moved_path, path)
            return False
        moved_path.unlink()
        return True

    def put_now(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        path = self._path(digest)
        if not self._holds(path, data):
            self._write(path, data)
        # This is needed for an existing file too, because its write may have been interrupted before.
        self._sync_folders(path)
        return digest

    def _write(self, path: Path, data: bytes) -> None:
        self._make_folders(path)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            _give_name(Path(name), path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(name)
            raise

    def _holds(self, path: Path, data: bytes) -> bool:
        """Return True if the file has these bytes. Its mode then shows that it was put again, and its time
        shows when."""
        try:
            if path.read_bytes() != data:
                return False
            path.chmod(_PUT_AGAIN)
            os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def get_now(self, digest: str) -> bytes:
        path = self._path(digest)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise BlobMissing(f"no object has the digest {digest}") from None
        found = hashlib.sha256(data).hexdigest()
        if found != digest:
            raise BlobCorrupt(f"{path} holds bytes of the digest {found}; restore it from a backup")
        return data

    def _append_now(self, path: Path, first_byte: int, data: bytes) -> int:
        self._make_folders(path)
        if not first_byte:
            path.unlink(missing_ok=True)  # after a crash, the blob may have both names
        with path.open("ab") as file:
            end_byte = file.tell()
            if end_byte == first_byte:
                file.write(data)
                return end_byte + len(data)
            return end_byte

    def _finish_now(self, upload: Path, digest: str, was_computed: bool) -> None:
        with upload.open("rb") as file:
            found = digest if was_computed else hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        if found != digest:
            upload.unlink()
            raise BlobCorrupt(f"an object was to have the digest {digest}, and its bytes have {found}")
        path = self._path(digest)
        self._make_folders(path)
        os.utime(upload)
        _give_name(upload, path)
        self._sync_folders(path)

    def _upload(self, name: str) -> Path:
        """Return the path of an upload. It is in a folder of blobs, where sweeps find uploads that were
        left."""
        if not _UPLOAD.fullmatch(name):
            raise ValueError(f"{name!r} cannot name a file")
        return self._root / "up" / "lo" / f".new-{name}"

    def _make_folders(self, path: Path) -> None:
        for folder in (self._root, path.parent.parent, path.parent):
            folder.mkdir(mode=0o700, parents=folder == self._root, exist_ok=True)

    def _sync_folders(self, path: Path) -> None:
        for folder in (path.parent, path.parent.parent, self._root, self._root.parent):
            sync_folder(folder)

    def _path(self, digest: str) -> Path:
        if len(digest) != _DIGEST_LENGTH or not set(digest) <= set("0123456789abcdef"):
            raise BlobMissing(f"{digest!r} is no sha256 digest")
        return self._root / digest[:2] / digest[2:4] / digest


def copy_objects(source: Path, target: Path, digests: Iterable[str]) -> frozenset[str]:
    """Copy blobs to `target` and read each one back. Returns the digests of those that are missing or
    damaged in `source`. Raises OSError."""
    source_blobs, target_blobs = DirectoryBlobs(source), DirectoryBlobs(target)
    lost = set()
    for digest in digests:
        try:
            target_blobs.put_now(source_blobs.get_now(digest))
            target_blobs.get_now(digest)
        except (BlobMissing, BlobCorrupt):
            lost.add(digest)
    return frozenset(lost)


def _was_put_once(file: os.stat_result) -> bool:
    return stat.S_IMODE(file.st_mode) != _PUT_AGAIN


def _give_name(file: Path, path: Path) -> None:
    """Move a file to a path. If there is a file already, it is replaced by one that is marked as put
    again."""
    try:
        os.link(file, path)
    except FileExistsError:
        file.chmod(_PUT_AGAIN)
        os.replace(file, path)
    else:
        file.unlink()


@contextmanager
def _skipping_faults(name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        pass  # another process has deleted the file
    except OSError as error:
        log.warning("object cannot be swept", digest=name, fault=str(error))


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that the names of its files are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
