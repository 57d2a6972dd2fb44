"""A virtual file system for SQLite that records writes and syncs, and what a power cut may leave of them.

It wraps SQLite's own VFS. It uses apsw, which has its own SQLite: Python's module cannot take a VFS.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import apsw
from msgspec import Struct

SECTOR = 512
"""Bytes that a disk writes atomically."""
Image = dict[str, bytes]
"""File -> content."""


class Write(Struct, frozen=True):
    file: str
    offset: int
    data: bytes


class Truncate(Struct, frozen=True):
    file: str
    size: int


class Sync(Struct, frozen=True):
    file: str


class Answered(Struct, frozen=True):
    """The number of statements that were answered by now."""

    statements: int


Step = Write | Truncate | Sync | Answered


class Disk(apsw.VFS):
    """Known to SQLite by `name`. `steps`: what was done, in order."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "")
        self.name = name
        self.steps: list[Step] = []

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        if name is None:
            return apsw.VFSFile("", name, flags)  # a temporary file: irrelevant after a crash
        return _File(self.steps, name, flags)


class _File(apsw.VFSFile):
    def __init__(self, steps: list[Step], name: Any, flags: list[int]) -> None:
        super().__init__("", name, flags)
        path = name if isinstance(name, str) else name.filename()
        self._name, self._steps = Path(path).name, steps

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        super().xWrite(data, offset)
        self._steps.append(Write(self._name, offset, bytes(data)))

    def xTruncate(self, size: int) -> None:  # noqa: N802
        super().xTruncate(size)
        self._steps.append(Truncate(self._name, size))

    def xSync(self, flags: int) -> None:  # noqa: N802
        super().xSync(flags)
        self._steps.append(Sync(self._name))


def crashes(
    steps: Sequence[Step], before: Image, points: Iterable[int], chance: Random
) -> Iterator[tuple[int, Image]]:
    """(statements answered, content of the disk) for a power cut after each of these numbers of steps."""
    synced = {file: bytearray(content) for file, content in before.items()}
    pending: dict[str, list[Write | Truncate]] = defaultdict(list)
    done, answered = 0, 0
    for point in sorted(points):
        for step in steps[done:point]:
            match step:
                case Answered(statements):
                    answered = statements
                case Sync(file):
                    content = synced.setdefault(file, bytearray())
                    for unsynced in pending.pop(file, ()):
                        _apply(content, unsynced)
                case _:
                    pending[step.file].append(step)
        done = point
        yield answered, _image(synced, pending, chance)


def _image(synced: dict[str, bytearray], pending: dict[str, list[Write | Truncate]], chance: Random) -> Image:
    """Everything synced, and a random part of what was written since."""
    image = {file: bytearray(content) for file, content in synced.items()}
    for file, unsynced in pending.items():
        kept = _kept(unsynced, len(synced.get(file, b"")), chance)
        if file in image or kept:
            content = image.setdefault(file, bytearray())
            for step in kept:
                _apply(content, step)
    return {file: bytes(content) for file, content in image.items()}


def _kept(unsynced: Sequence[Write | Truncate], size: int, chance: Random) -> list[Write | Truncate]:
    match chance.choice(("none", "all", "first", "any")):
        case "none":
            return []
        case "all":
            return list(unsynced)
        case "first":  # in order, the last one torn
            until = chance.randrange(len(unsynced))
            return [*unsynced[:until], *_torn(unsynced[until], size, chance)]
        case _:  # in any order
            share = chance.random()
            parts: list[Write | Truncate] = []
            for step in unsynced:
                is_complete = chance.random() < share
                parts += [step] if is_complete else _torn(step, size, chance) if chance.random() < 0.3 else []
            return parts


def _torn(step: Write | Truncate, size: int, chance: Random) -> list[Write | Truncate]:
    """Some of its sectors. One in twenty of the missing ones beyond the synced `size` holds random data."""
    if isinstance(step, Truncate):
        return []
    torn: list[Write | Truncate] = []
    start, end = step.offset, step.offset + len(step.data)
    while start < end:
        until = min(end, (start // SECTOR + 1) * SECTOR)
        fate = chance.random()
        if fate < 0.5:
            torn.append(Write(step.file, start, step.data[start - step.offset : until - step.offset]))
        elif fate < 0.525 and start >= size:
            torn.append(Write(step.file, start, chance.randbytes(until - start)))
        start = until
    return torn


def _apply(content: bytearray, step: Write | Truncate) -> None:
    if isinstance(step, Truncate):
        del content[step.size :]
        return
    if len(content) < step.offset:
        content.extend(bytes(step.offset - len(content)))
    content[step.offset : step.offset + len(step.data)] = step.data
