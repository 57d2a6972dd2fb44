"""Archives (tar) of directories: write one, and unpack one that anybody may have made."""

import os
import stat
import tarfile
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

_PART_BYTES = 2**20
MODE_BITS = 0o777
"""The bits of a mode that travel: no set-user-id, set-group-id or sticky bit."""


class BadArchive(ValueError):
    """The archive may not be unpacked; the text names the member and says why."""


class ArchiveLimits(NamedTuple):
    most_bytes: int
    most_files: int
    """The largest number of files, directories and links together."""


def head_of(member: tarfile.TarInfo) -> bytes:
    """Return the bytes that stand before the content of a member."""
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def filling_after(size_bytes: int) -> bytes:
    """Return the bytes after the content of a member, which ends a block."""
    return bytes(-size_bytes % tarfile.BLOCKSIZE)


END = bytes(2 * tarfile.BLOCKSIZE)
"""The bytes after the last member."""


def stays_inside(name: str, target: str) -> bool:
    """True if a link with this name and target leads to a place below the directory of the archive, whatever
    other links exist. `..` only goes up from real directories, so it is allowed only at the beginning."""
    parts = PurePosixPath(target).parts
    ups = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    depth = len(PurePosixPath(name).parts) - 1
    return bool(parts) and not target.startswith("/") and ups <= depth and ".." not in parts[ups:]


def unpack(
    archive: BinaryIO,
    target: Path,
    limits: ArchiveLimits,
    *,
    replaces: bool = False,
    files: list[str] | None = None,
) -> int:
    """Unpack the archive into an existing directory, and return the number of bytes of all files. Each member
    is checked before anything of it is written. With `replaces`, existing files are replaced. The names of
    files are appended to `files`. Raises BadArchive and OSError."""
    unpacking = _Unpacking(target, limits, replaces, [] if files is None else files)
    try:
        opened = tarfile.open(fileobj=archive, mode="r:", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
        with opened:
            for member in opened:
                unpacking.add(opened, member)
            _check_end(archive, opened.offset)
    except (tarfile.TarError, EOFError, OverflowError, UnicodeError) as fault:
        raise BadArchive(f"the archive cannot be read: {fault}") from None
    unpacking.finish()
    return unpacking.size_bytes


def _check_end(archive: BinaryIO, at: int) -> None:
    """Check that the bytes after the last member end the archive, since tarfile stops silently at a damaged
    head. Raises BadArchive if they do not."""
    archive.seek(at)
    if archive.read(tarfile.BLOCKSIZE).strip(b"\0"):
        raise BadArchive(f"the archive cannot be read: it is damaged at byte {at}")


class _Unpacking:
    def __init__(self, target: Path, limits: ArchiveLimits, replaces: bool, files: list[str]) -> None:
        self._target = str(target)
        self._limits = limits
        self._replaces = replaces
        self._files = files
        self._directories: dict[str, int] = {"": 0o700}
        """The directories that were made, with the mode of each. Files are written only into these."""
        self._members = 0
        self.size_bytes = 0

    def add(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        name = _checked_name(member.name)
        if not name:
            return  # the directory itself
        self._members += 1
        if self._members > self._limits.most_files:
            raise BadArchive(
                f"the archive has more than {self._limits.most_files} files and directories; leave some out"
            )
        self._make_directories(name)
        path = f"{self._target}/{name}"
        mode = member.mode & MODE_BITS
        if member.issparse():
            raise BadArchive(f"{name!r} is a sparse file, whose real size an archive hides; write it in full")
        if member.isdir():
            self._make_directory(name, mode)
        elif member.isreg():
            self._write(archive, member, path, mode)
            self._files.append(name)
        elif member.issym():
            self._link(name, member.linkname, path)
        else:
            raise BadArchive(f"{name!r} is no file, directory or symbolic link; leave it out")

    def finish(self) -> None:
        """Set the modes of directories, which had to be writable until now. The owner can always write to
        them."""
        for name, mode in self._directories.items():
            if name:
                os.chmod(f"{self._target}/{name}", mode | 0o700)  # a str is quicker

    def _write(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: str, mode: int) -> None:
        self.size_bytes += member.size
        if member.size < 0 or self.size_bytes > self._limits.most_bytes:
            raise BadArchive(
                f"the files of the archive have more than {self._limits.most_bytes} bytes; leave some out"
            )
        content = archive.extractfile(member)
        assert content is not None
        self._clear(path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb", buffering=0) as file:  # a descriptor
            while part := content.read(_PART_BYTES):
                file.write(part)
            os.fchmod(file.fileno(), mode | 0o400)

    def _link(self, name: str, target: str, path: str) -> None:
        if not stays_inside(name, target):
            raise BadArchive(f"the link {name!r} leads to {target!r}, out of the directory; leave it out")
        self._clear(path)
        os.symlink(target, path)  # a str is quicker

    def _clear(self, path: str) -> None:
        try:
            found = os.lstat(path).st_mode
        except FileNotFoundError:
            return
        if not self._replaces or stat.S_ISDIR(found):
            raise BadArchive(f"{path} is there already; an archive names each file once")
        os.unlink(path)  # a str is quicker

    def _make_directories(self, name: str) -> None:
        """Make the missing directories above the member `name`."""
        above = name.rpartition("/")[0]
        if above not in self._directories:
            self._make_directories(above)
            self._make_directory(above, 0o755)

    def _make_directory(self, name: str, mode: int) -> None:
        path = f"{self._target}/{name}"
        if name not in self._directories:
            try:
                os.mkdir(path, 0o700)  # a str is quicker
            except FileExistsError:
                if not self._replaces or not stat.S_ISDIR(os.lstat(path).st_mode):
                    raise BadArchive(f"{name!r} is a directory and something else; leave one out") from None
        self._directories[name] = mode


def _checked_name(name: str) -> str:
    """Return the name without `./` and `/` around it; empty for the unpacked directory itself."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts:
        raise BadArchive(f"{name!r} leads out of the directory; name members by their path below it")
    return "/".join(parts)
