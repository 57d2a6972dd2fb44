"""The archive of a directory: a tar file, the same for equal directories, so that its digest names it."""

import hashlib
import os
import stat
import tarfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import SpooledTemporaryFile
from typing import Any, BinaryIO, cast

from gpubroker.errors import WrongArgument
from gpubroker.runtime.archives import END, MODE_BITS, ArchiveLimits, filling_after, head_of, stays_inside
from gpubroker.uploads.ignoring import Entry, entries_of

_IN_MEMORY_BYTES = 64 * 2**20
_PART_BYTES = 2**20
_MOST_NAMED = 10
_REMEDY = "name it in .gpubrokerignore"


@dataclass(frozen=True, slots=True)
class Archive:
    """Close it when it is sent: `with archive_of(...) as archive`."""

    id: str
    """The SHA-256 of its bytes, which is the id of the object that it becomes."""
    size_bytes: int
    file: BinaryIO

    def __enter__(self) -> "Archive":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def archive_of(directory: Path, limits: ArchiveLimits) -> Archive:
    """Return the archive of a directory, in memory or in a temporary file.

    It has names in their order, modes, empty directories, and links that stay inside; no times and no owners.
    Raises WrongArgument for what cannot be sent.
    """
    if not directory.is_dir():
        found = "is not a directory" if directory.exists() else "does not exist"
        raise WrongArgument(f"upload: {directory} {found}; name the directory to send")
    entries = list(entries_of(directory))
    _check_size(directory, entries, limits)
    file = cast("BinaryIO", SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES))  # noqa: SIM115  # the caller's
    written = _Hashing(file)
    for entry in entries:
        _write(written, entry)
    written.write(END)
    return Archive(written.digest.hexdigest(), file.tell(), file)


class _Hashing:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> None:
        self.digest.update(data)
        self._file.write(data)


def _write(archive: _Hashing, entry: Entry) -> None:
    mode = entry.status.st_mode
    member = tarfile.TarInfo(entry.name)
    member.mode = mode & MODE_BITS
    if stat.S_ISDIR(mode):
        member.type = tarfile.DIRTYPE
        archive.write(head_of(member))
    elif stat.S_ISLNK(mode):
        member.type, member.mode, member.linkname = tarfile.SYMTYPE, 0o777, _inner_target(entry)
        archive.write(head_of(member))
    elif stat.S_ISREG(mode):
        member.size = entry.status.st_size
        archive.write(head_of(member))
        _write_content(archive, entry)
    else:
        raise WrongArgument(f"{entry.path} is no file, directory or link, and cannot be sent; {_REMEDY}")


def _write_content(archive: _Hashing, entry: Entry) -> None:
    left = size = entry.status.st_size
    try:
        with open(os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:  # no link
            while left and (part := file.read(min(left, _PART_BYTES))):
                archive.write(part)
                left -= len(part)
    except OSError as fault:
        raise WrongArgument(
            f"{entry.path} cannot be read: {fault.strerror}; allow it, or {_REMEDY}"
        ) from None
    if left:
        raise WrongArgument(f"{entry.path} became shorter while it was read; submit again, or {_REMEDY}")
    archive.write(filling_after(size))


def _inner_target(entry: Entry) -> str:
    """Return where a link points. Raises WrongArgument if that is not below the uploaded directory."""
    target = os.readlink(entry.path)
    if not stays_inside(entry.name, target):
        raise WrongArgument(
            f"the link {entry.path} leads to {target}, which is not in the directory that is sent, or not by "
            f"a path from the link; put what it means in its place, or {_REMEDY}"
        )
    return target


def _check_size(directory: Path, entries: Sequence[Entry], limits: ArchiveLimits) -> None:
    """Raises WrongArgument if there is too much, and names what takes most."""
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
