"""The archive of a directory: a tar file, the same for equal directories, so that its digest names it."""

import hashlib
import os
import stat
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from gpubroker.errors import WrongArgument
from gpubroker.runtime.archives import (
    END,
    MODE_BITS,
    ArchiveLimits,
    filling_after,
    head_of,
    stays_inside,
)
from gpubroker.uploads.ignoring import Entry, entries_of

_PART_BYTES = 2**20
_KEPT_BYTES = 64 * 2**20
"""The size up to which an archive stays in memory after it was hashed, so that its files are read once."""
_MOST_NAMED = 10
_REMEDY = "name it in .gpubrokerignore"


class Archive:
    """The archive of a directory, which is a `transport.bodies.Body`."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        """Compute the layout of the archive. Raises WrongArgument for files that cannot be sent."""
        self._members = [(_head(entry), entry) for entry in entries]
        self.size_bytes = len(END) + sum(
            len(head) + _padded(_content(entry)) for head, entry in self._members
        )
        self._kept: Sequence[bytes] = ()

    @cached_property
    def id(self) -> str:
        """The SHA-256 of the archive's bytes, which is the id of the object that it becomes. Raises
        WrongArgument."""
        digest, parts = hashlib.sha256(), []
        for part in self._read():
            digest.update(part)
            if self.size_bytes <= _KEPT_BYTES:
                parts.append(part)
        self._kept = parts
        return digest.hexdigest()

    def parts(self) -> Iterator[bytes]:
        """Yield the bytes of the archive. A large one is read again from the files. Raises WrongArgument for
        files that can no longer be read."""
        yield from self._kept or self._read()

    def _read(self) -> Iterator[bytes]:
        gathered: list[bytes] = []
        gathered_bytes = 0
        for head, entry in self._members:
            gathered.append(head)
            if size := _content(entry):
                for data in _content_of(entry, size):
                    gathered.append(data)
                    gathered_bytes += len(data)
                    if gathered_bytes >= _PART_BYTES:
                        yield b"".join(gathered)
                        gathered, gathered_bytes = [], 0
                gathered.append(filling_after(size))
        yield b"".join([*gathered, END])


def archive_of(directory: Path, limits: ArchiveLimits) -> Archive:
    """Return the archive of a directory: sorted names, modes, empty directories, and links that stay inside;
    no times and no owners. Raises WrongArgument for files that cannot be sent."""
    if not directory.is_dir():
        found = "is not a directory" if directory.exists() else "does not exist"
        raise WrongArgument(f"upload: {directory} {found}; name the directory to send")
    entries = list(entries_of(directory))
    _check_size(directory, entries, limits)
    return Archive(entries)


def archive_of_files(directory: Path, names: Sequence[str]) -> Archive:
    """Return the archive of some files of a directory. Raises WrongArgument for files that cannot be sent."""
    try:
        return Archive([Entry(name, directory / name, (directory / name).stat()) for name in sorted(names)])
    except OSError as fault:
        raise WrongArgument(f"{fault.filename} cannot be read: {fault.strerror}") from None


def _head(entry: Entry) -> bytes:
    mode = entry.status.st_mode
    member = tarfile.TarInfo(entry.name)
    member.mode = mode & MODE_BITS
    if stat.S_ISDIR(mode):
        member.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(mode):
        member.type, member.mode, member.linkname = tarfile.SYMTYPE, MODE_BITS, _inner_target(entry)
    elif stat.S_ISREG(mode):
        member.size = entry.status.st_size
    else:
        raise WrongArgument(f"{entry.path} is no file, directory or link, and cannot be sent; {_REMEDY}")
    return head_of(member)


def _content(entry: Entry) -> int:
    """Return the number of content bytes of an entry."""
    return entry.status.st_size if stat.S_ISREG(entry.status.st_mode) else 0


def _padded(size_bytes: int) -> int:
    return size_bytes + len(filling_after(size_bytes))


def _content_of(entry: Entry, size_bytes: int) -> Iterator[bytes]:
    unread_bytes = size_bytes
    try:
        file = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            while unread_bytes and (part := os.read(file, min(unread_bytes, _PART_BYTES))):
                yield part
                unread_bytes -= len(part)
        finally:
            os.close(file)
    except OSError as fault:
        raise WrongArgument(
            f"{entry.path} cannot be read: {fault.strerror}; allow it, or {_REMEDY}"
        ) from None
    if unread_bytes:
        raise WrongArgument(f"{entry.path} became shorter while it was read; submit again, or {_REMEDY}")


def _inner_target(entry: Entry) -> str:
    """Return the target of a link. Raises WrongArgument if it is not below the uploaded directory."""
    target = os.readlink(entry.path)
    if not stays_inside(entry.name, target):
        raise WrongArgument(
            f"the link {entry.path} leads to {target}, which is not in the directory that is sent, or not by "
            f"a path from the link; put what it means in its place, or {_REMEDY}"
        )
    return target


def _check_size(directory: Path, entries: Sequence[Entry], limits: ArchiveLimits) -> None:
    """Check the size and number of the entries. Raises WrongArgument, which names the largest parts, if they
    are too many."""
    size_bytes = sum(entry.status.st_size for entry in entries if stat.S_ISREG(entry.status.st_mode))
    if len(entries) > limits.most_files:
        counted = Counter(str(PurePosixPath(entry.name).parent) for entry in entries)
        largest = [f"{count} in {name}" for name, count in counted.most_common(_MOST_NAMED)]
        raise WrongArgument(
            f"{directory} has {len(entries)} files and directories, and an upload may have "
            f"{limits.most_files}; {_leave_out(largest)}"
        )
    if size_bytes > limits.most_bytes:
        by_size = sorted(entries, key=lambda entry: -entry.status.st_size)[:_MOST_NAMED]
        largest = [f"{_size(entry.status.st_size)} {entry.name}" for entry in by_size]
        raise WrongArgument(
            f"{directory} has {_size(size_bytes)}, and an upload may have {_size(limits.most_bytes)}; "
            f"{_leave_out(largest)}"
        )


def _leave_out(largest: Sequence[Any]) -> str:
    lines = "".join(f"\n  {line}" for line in largest)
    return (
        f"name what the task does not need in .gpubrokerignore, and store data as objects; the most:{lines}"
    )


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
