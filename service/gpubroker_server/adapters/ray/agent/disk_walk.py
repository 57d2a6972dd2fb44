"""The files below the roots of the disk guard. No symbolic link is followed, and no other mount is entered:
every directory is opened by its name relative to the descriptor of its parent."""

import errno
import fcntl
import os
import signal
import sqlite3
import stat
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import PurePath
from typing import NamedTuple

FileId = tuple[int, int]
"""Device and inode."""
Mount = tuple[int, str]
"""The device, and the kernel's line with the id of the mount. The id is needed, because a part of the same
device may be mounted elsewhere."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
DEEPEST = 64
"""The most levels of directories that are entered."""
SQLITE_HEADER = b"SQLite format 3\x00"
LARGEST_DATABASE_BYTES = 64 * 2**20
"""A larger database is not read, and is taken for one with rows."""


class Unsafe(Exception):
    """Nothing here may be deleted. The message says why."""


class Entry(NamedTuple):
    """A regular file below a root."""

    path: str
    """The path relative to the root."""
    status: os.stat_result
    has_journal: bool


@dataclass(slots=True)
class Walk:
    root: str
    most: int
    """The most files that the walk collects. It ends there."""
    spared: frozenset[FileId]
    """The directories that are not entered."""
    is_complete: bool = True
    """True if the walk saw everything below the root."""
    entries: list[Entry] = field(default_factory=list)

    def run(self) -> None:
        """Collect the files below the root in `entries`. Raises OSError and Unsafe."""
        with opened_root(self.root, self.spared) as (root, mount):
            self._enter(root, "", mount, 0)

    def _enter(self, directory: int, prefix: str, mount: Mount, depth: int) -> None:
        with os.scandir(directory) as listing:
            names = sorted(entry.name for entry in islice(listing, self.most + 1))
        self.is_complete &= len(names) <= self.most
        known = frozenset(names)
        for name in names:
            try:
                name.encode()  # a path is reported as text, so it must be valid UTF-8
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    self._enter_below(directory, name, f"{prefix}{name}/", mount, depth + 1)
                elif stat.S_ISREG(status.st_mode) and status.st_dev == mount[0]:
                    if len(self.entries) >= self.most:
                        self.is_complete = False
                        return
                    has_journal = not known.isdisjoint((f"{name}-wal", f"{name}-journal"))
                    self.entries.append(Entry(prefix + name, status, has_journal))
            except FileNotFoundError:
                continue
            except (OSError, UnicodeEncodeError):
                self.is_complete = False

    def _enter_below(self, directory: int, name: str, prefix: str, mount: Mount, depth: int) -> None:
        if depth > DEEPEST:
            self.is_complete = False
            return
        with opened(name, _DIRECTORY, directory) as below:
            if mount_of(below) == mount and file_id(os.fstat(below)) not in self.spared:
                self._enter(below, prefix, mount, depth)


def file_id(status: os.stat_result) -> FileId:
    return status.st_dev, status.st_ino


def mount_of(descriptor: int) -> Mount:
    with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as lines:
        return os.fstat(descriptor).st_dev, next((line for line in lines if line.startswith("mnt_id:")), "")


@contextmanager
def opened(name: str, flags: int, directory: int | None = None) -> Iterator[int]:
    descriptor = os.open(name, flags, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def opened_root(root: str, spared: frozenset[FileId]) -> Iterator[tuple[int, Mount]]:
    """Open the root and yield its descriptor and mount. Raises OSError, and Unsafe if the root is in a
    spared directory or is a symbolic link."""
    if os.path.islink(root):
        real = os.path.realpath(root)
        raise Unsafe(f"{root} is a symbolic link, which is not followed; write {real} in fleet.disk.roots")
    with opened(root, _DIRECTORY) as descriptor:
        above = os.dup(descriptor)
        try:
            while True:
                seen = os.fstat(above)
                if file_id(seen) in spared:
                    raise Unsafe(f"{root} is in a directory of the service (data_dir, objects or runs)")
                higher = os.open("..", _DIRECTORY, dir_fd=above)
                os.close(above)
                above = higher
                if os.path.sameopenfile(above, descriptor) or file_id(os.fstat(above)) == file_id(seen):
                    break
        finally:
            os.close(above)
        yield descriptor, mount_of(descriptor)


@contextmanager
def opened_directory_of(root: int, path: str, mount: Mount, spared: frozenset[FileId]) -> Iterator[int]:
    """Open the directory of a file below the root and yield its descriptor. Raises OSError, and Unsafe if
    the path leaves the root's mount or enters a spared directory."""
    descriptor = os.dup(root)
    try:
        for name in path.split("/")[:-1]:
            if name in ("", ".", ".."):
                raise Unsafe(f"{path} is no path below its root")
            below = os.open(name, _DIRECTORY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
            if mount_of(descriptor) != mount or file_id(os.fstat(descriptor)) in spared:
                raise Unsafe(f"{path} is on another file system, or in a directory of the service")
        yield descriptor
    finally:
        os.close(descriptor)


def mount_point_of(path: str) -> str:
    """Return the mount point of a path. It is found by names alone, because the file system there may
    hang."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        points = [mount.split()[4] for mount in mounts]
    return max((point for point in points if is_at(path, (point,))), key=len, default="/")


def is_at(path: str, places: Iterable[str]) -> bool:
    """Return True if the path is one of these places or below one of them."""
    return any(f"{path}/".startswith(f"{place.rstrip('/')}/") for place in places)


@contextmanager
def not_opened_by_others(held: int) -> Iterator[bool | None]:
    """Take a lease on an open file. Yield True if nothing else has the file open; the kernel then lets
    nothing else open it until the context ends. Yield False if the file is open elsewhere. Yield None if the
    file system has no leases, or allows them only to the file's owner."""
    fcntl.fcntl(held, fcntl.F_SETSIG, signal.SIGURG)  # the signal of a waiting open would end this process
    try:
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as fault:
        yield False if fault.errno == errno.EAGAIN else None
        return
    try:
        yield True
    finally:
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def is_named(held: int, name: str, directory: int) -> bool:
    """Return True if the name in this directory stands for the file that is open as `held`."""
    return os.path.samestat(os.stat(name, dir_fd=directory, follow_symlinks=False), os.fstat(held))


def deleted(held: int, name: str, directory: int) -> bool:
    """Delete the file that is open as `held`, and return True. Return False and keep it if the name stands
    for another file by now, or if a process waits for the lease to open it. The file is renamed first,
    because `unlink` deletes whichever file has the name."""
    moved_name = f".gpubroker-{os.urandom(8).hex()}"
    os.rename(name, moved_name, src_dir_fd=directory, dst_dir_fd=directory)
    may_go = is_named(held, moved_name, directory) and fcntl.fcntl(held, fcntl.F_GETLEASE) == fcntl.F_WRLCK
    if not may_go:
        os.link(moved_name, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
    os.unlink(moved_name, dir_fd=directory)
    return may_go


def own_names(root: str, files: Iterable[str], paths: Iterable[str]) -> set[str]:
    """Return the paths below the root that stand for these paths, which may reach the root or a directory of
    its `files` through links and mounts. For a path that contains the root, the root itself is returned."""
    names: dict[FileId, str] = {}
    above = {file_id(os.stat(place)) for place in PurePath(os.path.realpath(root)).parents}
    for below in {PurePath(), *(place for path in files for place in PurePath(path).parents)}:
        with suppress(OSError):
            names[file_id(os.stat(root / below))] = str(root / below)
    own_paths = set()
    for form in {PurePath(form) for path in paths for form in (path, os.path.realpath(path))}:
        for place in (form, *form.parents):
            with suppress(OSError):
                file = file_id(os.stat(place))
                if file in names:
                    own_paths.add(os.path.join(names[file], form.relative_to(place)))
                elif file in above and place == form:
                    own_paths.add(root)
    return own_paths


def is_empty_database(root: str, path: str, spared: frozenset[FileId]) -> bool:
    """Return True if the path is a SQLite file in which no table has a row. The file is read as bytes from
    one descriptor, because its path may stand for another file meanwhile."""
    try:
        with (
            opened_root(root, spared) as (top, mount),
            opened_directory_of(top, path, mount, spared) as directory,
            opened(path.rpartition("/")[2], _FILE, directory) as file,
        ):
            if os.fstat(file).st_size > LARGEST_DATABASE_BYTES:
                return False
            with open(file, "rb", closefd=False) as readable:
                data = bytearray(readable.read(LARGEST_DATABASE_BYTES))
        return bytes(data[:16]) == SQLITE_HEADER and not _has_rows(data)
    except (OSError, Unsafe, sqlite3.Error):
        return False


def _has_rows(data: bytearray) -> bool:
    data[18:20] = b"\x01\x01"  # a copy in memory has no write-ahead log
    with closing(sqlite3.connect(":memory:")) as database:
        database.deserialize(bytes(data))
        tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        quoted = ('"' + name.replace('"', '""') + '"' for (name,) in tables)
        return any(database.execute(f"SELECT 1 FROM {name} LIMIT 1").fetchone() for name in quoted)  # noqa: S608
