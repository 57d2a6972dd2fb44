"""A disk that remembers in which order it was written to and synced, and what a power cut may leave of that.

SQLite's own file system layer does the work; this one stands in front of it and takes notes (apsw, which
brings a SQLite of its own: Python's cannot be given one).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import apsw

SECTOR = 512
"""What a disk writes whole or not at all."""
Image = dict[str, bytes]
"""File -> what is in it."""


@dataclass(frozen=True, slots=True)
class Write:
    file: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Truncate:
    file: str
    size: int


@dataclass(frozen=True, slots=True)
class Sync:
    file: str


@dataclass(frozen=True, slots=True)
class Told:
    """Of the statements that are recorded, so many had been answered by now."""

    statements: int


Step = Write | Truncate | Sync | Told


class Disk(apsw.VFS):
    """Known to SQLite by `name`. `steps`: what was done, in order."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "")
        self.name = name
        self.steps: list[Step] = []

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        if name is None:
            return apsw.VFSFile("", name, flags)  # a temporary one: of no interest after a crash
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
    """(statements answered, what is on the disk) for a power cut after each of `points` many steps."""
    synced = {file: bytearray(content) for file, content in before.items()}
    pending: dict[str, list[Write | Truncate]] = defaultdict(list)
    done, answered = 0, 0
    for point in sorted(points):
        for step in steps[done:point]:
            match step:
                case Told(statements):
                    answered = statements
                case Sync(file):
                    content = synced.setdefault(file, bytearray())
                    for late in pending.pop(file, ()):
                        _do(content, late)
                case _:
                    pending[step.file].append(step)
        done = point
        yield answered, _image(synced, pending, chance)


def _image(synced: dict[str, bytearray], pending: dict[str, list[Write | Truncate]], chance: Random) -> Image:
    """What was synced, and of everything since then whatever the disk happened to write."""
    image = {file: bytearray(content) for file, content in synced.items()}
    for file, late in pending.items():
        kept = _kept(late, len(synced.get(file, b"")), chance)
        if file in image or kept:
            content = image.setdefault(file, bytearray())
            for step in kept:
                _do(content, step)
    return {file: bytes(content) for file, content in image.items()}


def _kept(late: Sequence[Write | Truncate], size: int, chance: Random) -> list[Write | Truncate]:
    match chance.choice(("none", "all", "first", "any")):
        case "none":
            return []
        case "all":
            return list(late)
        case "first":  # in order, and the last of them torn
            until = chance.randrange(len(late))
            return [*late[:until], *_torn(late[until], size, chance)]
        case _:  # a disk writes in what order it likes
            share = chance.random()
            parts: list[Write | Truncate] = []
            for step in late:
                whole = chance.random() < share
                parts += [step] if whole else _torn(step, size, chance) if chance.random() < 0.3 else []
            return parts


def _torn(step: Write | Truncate, size: int, chance: Random) -> list[Write | Truncate]:
    """Some of its sectors. Of those that are missing beyond the `size` that was synced, one in twenty holds
    what another file left there."""
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


def _do(content: bytearray, step: Write | Truncate) -> None:
    if isinstance(step, Truncate):
        del content[step.size :]
        return
    if len(content) < step.offset:
        content.extend(bytes(step.offset - len(content)))
    content[step.offset : step.offset + len(step.data)] = step.data
