"""Uploaded directories on this node. A directory is unpacked once, and copied for each run that works in
it."""

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections import Counter
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import NamedTuple

import structlog
from gpubroker.runtime.archives import ArchiveLimits, unpack

log = structlog.get_logger("gpubroker.agent")

_FICLONE = 0x40049409
"""The ioctl of linux/fs.h by which a new file shares the blocks of another one until one of them is
written."""
_COPIED_BYTES = 16 * 2**20
_LEAST_BYTES = 4096
"""The least disk space that a file or a directory takes."""


class Owner(NamedTuple):
    """The user and the group that own a run's files, if they are not those of this process."""

    uid: int
    gid: int


class UploadCache:
    """The unpacked directories of this node, one per tenant and object. Only this user can read them.

    A directory is complete if a file beside it contains its size in bytes. The modification time of that
    file is the time of the last use.
    """

    def __init__(self, directory: Path, limits: ArchiveLimits, most_bytes: int) -> None:
        self._directory = directory
        self._limits = limits
        self._most_bytes = most_bytes
        self._in_use: Counter[str] = Counter()
        self._lock = Lock()
        """Held while directories are chosen and dropped. Archives are unpacked and copied in several
        threads."""

    def find(self, tenant: str, id: str) -> Path | None:
        """Return the unpacked directory of an object; None if it is not on this node."""
        path = self._directory / _name_of(tenant, id)
        return path if _size_file(path).exists() else None

    def add(self, tenant: str, id: str, data: bytearray) -> Path:
        """Unpack an archive and return its directory. Raises BadArchive and OSError, and then leaves nothing
        of it."""
        path = self._directory / _name_of(tenant, id)
        if _size_file(path).exists():
            return path
        draft = path.with_suffix(".new")
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(path, ignore_errors=True)
        try:
            draft.mkdir(mode=0o700, parents=True)
            with TemporaryFile(dir=self._directory) as archive:  # a copy in memory would take as much again
                archive.write(data)
                archive.seek(0)
                unpack(archive, draft, self._limits)
            size_bytes = _bytes_below(draft)
            draft.rename(path)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        _size_file(path).write_text(str(size_bytes), encoding="ascii")
        self._drop_least_used()
        return path

    def copy(self, source: Path, target: Path, owner: Owner | None) -> None:
        """Make a copy of an unpacked directory that belongs to `owner`. Raises OSError."""
        with self._lock:
            self._in_use[source.name] += 1
        try:
            with contextlib.suppress(OSError):
                os.utime(_size_file(source))
            _copy_directory(str(source), str(target), owner)
        finally:
            self._in_use[source.name] -= 1

    def clean(self) -> None:
        """Remove the directories that an earlier agent did not finish."""
        for path in self._directory.glob("*"):
            if path.is_dir() and not _size_file(path).exists():
                shutil.rmtree(path, ignore_errors=True)
        self._drop_least_used()

    def _drop_least_used(self) -> None:
        with self._lock:
            self._drop_now()

    def _drop_now(self) -> None:
        sizes = sorted(self._directory.glob("*.size"), key=lambda file: file.stat().st_mtime, reverse=True)
        kept_bytes = 0
        for file in sizes:
            kept_bytes += int(file.read_text(encoding="ascii") or 0)
            path = file.with_suffix("")
            is_newest = file is sizes[0]
            if kept_bytes > self._most_bytes and not is_newest and not self._in_use[path.name]:
                log.info("an uploaded directory that was not used lately is removed", path=str(path))
                file.unlink(missing_ok=True)  # removed first: without it, the directory counts as unfinished
                shutil.rmtree(path, ignore_errors=True)


def remove_tree(directory: str) -> None:
    """Remove a directory with all files that a run has left in it. Raises OSError."""
    try:
        shutil.rmtree(directory)
    except PermissionError:
        if os.geteuid() == 0:
            raise
        os.chmod(directory, 0o700)  # the run had this user, and may have taken permissions from directories
        for path, names, _ in os.walk(directory):
            for inner in (f"{path}/{name}" for name in names):
                if not os.path.islink(inner):
                    os.chmod(inner, 0o700)
        shutil.rmtree(directory)


def _name_of(tenant: str, id: str) -> str:
    return f"{hashlib.sha256(tenant.encode()).hexdigest()[:16]}-{id}"


def _size_file(path: Path) -> Path:
    return path.with_suffix(".size")


def _bytes_below(directory: Path) -> int:
    total = 0
    for path, _, names in os.walk(directory):
        total += _LEAST_BYTES + sum(
            max(_LEAST_BYTES, os.lstat(os.path.join(path, name)).st_size)  # quicker
            for name in names
        )
    return total


def _copy_directory(source: str, target: str, owner: Owner | None) -> None:
    os.mkdir(target, 0o700)  # a str is quicker
    with os.scandir(source) as entries:
        for entry in entries:
            path = f"{target}/{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                _copy_directory(entry.path, path, owner)
            elif entry.is_symlink():
                os.symlink(os.readlink(entry.path), path)  # a str is quicker
                if owner is not None:
                    os.lchown(path, *owner)
            else:
                _copy_file(entry.path, path, owner)
    os.chmod(target, os.stat(source).st_mode & 0o777)  # a str is quicker
    if owner is not None:
        os.chown(target, *owner)


def _copy_file(source: str, target: str, owner: Owner | None) -> None:
    """Copy a file, by sharing its blocks where the file system can. A hard link would not do: one run could
    then change the files of others."""
    with open(source, "rb", buffering=0) as old, open(target, "xb", buffering=0) as new:  # quicker
        status = os.fstat(old.fileno())
        try:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
        except OSError:
            while os.sendfile(new.fileno(), old.fileno(), None, _COPIED_BYTES):
                pass
        os.fchmod(new.fileno(), status.st_mode & 0o777)
        if owner is not None:
            os.fchown(new.fileno(), *owner)
