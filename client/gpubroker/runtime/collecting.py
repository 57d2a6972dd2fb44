"""A program that writes the files of a run's directory that match its patterns into an archive.

    python -I -m gpubroker.runtime.collecting USER DIRECTORY MAX_BYTES MAX_FILES PATTERN...

It becomes the user first, so that it reads what the run itself could read, and follows no link. The archive
goes to standard output; then a line of JSON on standard error says how many files it has, and what is
missing.
"""

import contextlib
import json
import os
import re
import stat
import sys
import tarfile
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

from gpubroker.runtime.archives import END, MODE_BITS, ArchiveLimits, filling_after, head_of
from gpubroker.runtime.process import become

_PART_BYTES = 2**20
_MAX_DEPTH = 100


class Collected(NamedTuple):
    files: int
    message: str
    """What was left out and why; empty if nothing was."""


def pattern_of(patterns: Sequence[str]) -> re.Pattern[str]:
    """Return an expression for the paths of files that a pattern names, or that are below a directory that a
    pattern names. `*` and `?` stand for characters of one name, `**` for any directories."""
    return re.compile("|".join(f"(?:{_regex_of(pattern)}(?:/.*)?)" for pattern in patterns), re.DOTALL)


def _regex_of(pattern: str) -> str:
    parts = pattern.removesuffix("/").split("/")
    regex = ""
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        if part == "**":
            regex += ".+" if is_last else "(?:.*/)?"
            continue
        named = "".join("[^/]*" if c == "*" else "[^/]" if c == "?" else re.escape(c) for c in part)
        regex += named if is_last else f"{named}/"
    return regex


class _Collecting:
    def __init__(self, patterns: Sequence[str], limits: ArchiveLimits, archive: BinaryIO) -> None:
        self._matches = pattern_of(patterns).fullmatch
        self._limits = limits
        self._archive = archive
        self._made: set[str] = set()
        self.files = self.size_bytes = self.beyond = self.unreadable = self.links = 0

    def walk(self, descriptor: int, within: str, depth: int = 0) -> None:
        for name, status in _entries(descriptor):
            path = within + name
            if stat.S_ISDIR(status.st_mode) and depth < _MAX_DEPTH:
                try:
                    inner = _open_at(descriptor, name, os.O_DIRECTORY)
                except OSError:
                    self.unreadable += bool(self._matches(path))
                    continue
                try:
                    self.walk(inner, f"{path}/", depth + 1)
                finally:
                    os.close(inner)
            elif self._matches(path) and stat.S_ISLNK(status.st_mode):
                self.links += 1
            elif self._matches(path) and stat.S_ISREG(status.st_mode):
                self._take(descriptor, name, path)

    def _take(self, directory: int, name: str, path: str) -> None:
        try:
            file = open(_open_at(directory, name, os.O_NONBLOCK), "rb")  # noqa: SIM115  # closed below
        except OSError:
            self.unreadable += 1
            return
        with file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return
            is_much = self.size_bytes + status.st_size > self._limits.most_bytes
            if is_much or self.files >= self._limits.most_files:
                self.beyond += 1
                return
            self.files += 1
            self.size_bytes += status.st_size
            self._make_directories(path)
            self._write(file, path, status)

    def _write(self, file: BinaryIO, path: str, status: os.stat_result) -> None:
        member = tarfile.TarInfo(path)
        member.size, member.mode = status.st_size, status.st_mode & MODE_BITS
        member.mtime = int(status.st_mtime)
        self._archive.write(head_of(member))
        unwritten_bytes = member.size
        while unwritten_bytes and (part := file.read(min(unwritten_bytes, _PART_BYTES))):
            self._archive.write(part)
            unwritten_bytes -= len(part)
        while unwritten_bytes:  # the file became shorter meanwhile
            self._archive.write(bytes(min(unwritten_bytes, _PART_BYTES)))
            unwritten_bytes -= min(unwritten_bytes, _PART_BYTES)
        self._archive.write(filling_after(member.size))

    def _make_directories(self, path: str) -> None:
        above = path.rpartition("/")[0]
        if above and above not in self._made:
            self._make_directories(above)
            self._made.add(above)
            member = tarfile.TarInfo(above)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            self._archive.write(head_of(member))

    def collected(self) -> Collected:
        most = f"{self._limits.most_bytes} bytes and {self._limits.most_files} files"
        counts = (
            (self.beyond, f"beyond the limits of {most} (limits.output_bytes, limits.output_files)"),
            (self.unreadable, "that cannot be read"),
            (self.links, "that are links"),
        )
        left_out = [f"{number} {why}" for number, why in counts if number]
        return Collected(self.files, f"left out: {', '.join(left_out)}" if left_out else "")


def _entries(descriptor: int) -> Iterator[tuple[str, os.stat_result]]:
    for name in sorted(os.listdir(descriptor)):
        with contextlib.suppress(OSError):
            yield name, os.stat(name, dir_fd=descriptor, follow_symlinks=False)


def _open_at(directory: int, name: str, flags: int) -> int:
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=directory)


def collect(directory: str, patterns: Sequence[str], limits: ArchiveLimits, archive: BinaryIO) -> Collected:
    """Write the archive of the files that match. Raises OSError if the directory cannot be read, or the
    archive cannot be written."""
    collecting = _Collecting(patterns, limits, archive)
    top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        collecting.walk(top, "")
    finally:
        os.close(top)
    if collecting.files:
        archive.write(END)
    return collecting.collected()


def main() -> None:
    user, directory, most_bytes, most_files, *patterns = sys.argv[1:]
    try:
        if user:
            become(user)
        limits = ArchiveLimits(int(most_bytes), int(most_files))
        with open(1, "wb", closefd=False) as archive:
            collected = collect(directory, patterns, limits, archive)
    except (OSError, KeyError) as fault:
        collected = Collected(0, f"{directory} cannot be read: {fault}")
    print(json.dumps(collected._asdict()), file=sys.stderr)


if __name__ == "__main__":
    main()
