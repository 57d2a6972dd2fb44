"""One small file per run that has a process of its own: what a later agent must know to take it over."""

import contextlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from gpubroker.runtime.messages import RunKey
from gpubroker.runtime.output import tail_of_file

from gpubroker_server.adapters.ray.processes import ProcessId

LOG_BYTES = 16 * 2**20
"""A log that has grown longer is begun anew with its last lines."""
KEPT_LOGS = 1000
KEPT_LOG_BYTES = 2**30
"""Of runs that have gone only the newest logs stay: so many, and so much in all."""


_STEM = re.compile(r"(.+)-(\d+)-(\d+)")


class UnreadableCard(Exception):
    """A run may live of which nothing else is known; whoever goes on would call it gone."""


@dataclass(frozen=True, slots=True)
class Card:
    """Written before the run's process hears of the run, removed when no process of it is left.

    It may be read by an agent of another release, so a field that is added has a default.
    """

    task: str
    fence: int
    rank: int
    leases: tuple[tuple[str, int], ...]
    """(device UUID, MiB)"""
    runner: str
    """Name of its Ray actor; empty for a process that somebody else started."""
    pid: int
    start_ticks: int
    ray_node: str
    """Ray's id of the node: another one means that the Ray it belonged to is gone."""
    memory_mb: int = 0
    """Host memory that it asked for."""

    @property
    def key(self) -> RunKey:
        return RunKey(self.task, self.fence, self.rank)

    @property
    def process(self) -> ProcessId:
        return ProcessId(self.pid, self.start_ticks)


class RunFiles:
    """Cards and logs of one node's runs, in one directory of mode 0700.

    A card's file is named after the boot it was written in: whatever a power cut left of others names no
    process any more, and need not be read. The kernel keeps what was written since.
    """

    def __init__(self, directory: Path, boot_id: str) -> None:
        """Raises PermissionError if others could put files there."""
        _make_private(directory)
        # As the kernel spells it, because leftovers are found by the log they print to.
        self._directory = directory.resolve()
        self._ending = f"@{boot_id}.json"

    def log_of(self, key: RunKey) -> Path:
        return self._directory / f"{_stem(key)}.log"

    def key_of_log(self, path: str) -> RunKey | None:
        """Whose log this is; None if it is none of this node's. It may have been removed meanwhile."""
        log = Path(path.removesuffix(" (deleted)"))
        if log.parent != self._directory or log.suffix != ".log":
            return None
        named = _STEM.fullmatch(log.stem)
        return None if named is None else RunKey(unquote(named[1]), int(named[2]), int(named[3]))

    def write_card(self, card: Card) -> None:
        """Raises OSError if the disk takes no more; then there is none."""
        draft = self._directory / f"{_stem(card.key)}.new"
        try:
            draft.write_text(json.dumps(asdict(card)))
            draft.replace(self._card_of(_stem(card.key)))
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise

    def remove_card(self, key: RunKey) -> None:
        self._card_of(_stem(key)).unlink(missing_ok=True)

    def cards(self) -> list[Card]:
        """Those of this boot. Raises UnreadableCard."""
        return [self._read(path) for path in sorted(self._directory.glob(f"*{self._ending}"))]

    def remove_outdated(self) -> None:
        """Cards of earlier boots, and what was never finished."""
        for path in [*self._directory.glob("*.json"), *self._directory.glob("*.new")]:
            if not path.name.endswith(self._ending):
                path.unlink(missing_ok=True)

    def tidy(self) -> None:
        """Bound what logs take. One that is still written to is never removed."""
        logs = list(self._logs())
        logs.sort(key=lambda log: log[1].st_mtime, reverse=True)
        kept_bytes = kept = 0
        for path, status in logs:
            if status.st_size > LOG_BYTES:
                _begin_anew(path)
            elif not self._card_of(path.stem).exists():
                kept_bytes, kept = kept_bytes + status.st_size, kept + 1
                if kept > KEPT_LOGS or kept_bytes > KEPT_LOG_BYTES:
                    path.unlink(missing_ok=True)

    def remove_all(self) -> None:
        """The directory, too, and the one above it if no other node has any."""
        with contextlib.suppress(OSError):
            shutil.rmtree(self._directory)
            self._directory.parent.rmdir()

    def _read(self, path: Path) -> Card:
        try:
            card = _card_told(json.loads(_read_own(path)))
            if self._card_of(_stem(card.key)) != path:
                raise ValueError(f"it is the card of {card.key}")
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as fault:
            raise UnreadableCard(
                f"the card {path} cannot be read: {fault}; it names a run that may still live, so this node "
                "answers nobody. End that run's processes if there are any, then remove the file"
            ) from fault
        return card

    def _logs(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self._directory.glob("*.log"):
            with contextlib.suppress(FileNotFoundError):
                yield path, path.stat()

    def _card_of(self, stem: str) -> Path:
        return self._directory / f"{stem}{self._ending}"


def _stem(key: RunKey) -> str:
    return quote(f"{key.task}-{key.fence}-{key.rank}", safe="")


def _card_told(told: dict[str, Any]) -> Card:
    known = {f.name: told[f.name] for f in fields(Card) if f.name in told}
    return Card(**{**known, "leases": tuple((uuid, mb) for uuid, mb in told["leases"])})


def _begin_anew(log: Path) -> None:
    tail = tail_of_file(log)
    with log.open("ab") as file:  # as its writers have it: they go on behind what is put here
        file.truncate(0)
        file.write(b"[...]\n" + tail)


def _read_own(path: Path) -> bytes:
    """Of a file that this user made: who is killed stands in it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError("it was made by somebody else")
        return file.read()


def _make_private(directory: Path) -> None:
    """Make the directory and what is missing above it, for this user only.

    Below a directory in which everybody may make files, nobody but root and this user may own a part of the
    path or write to it: otherwise somebody could have put it there first, or could put another in its place.
    """
    directory = directory.absolute()
    is_open = False
    for part in [*reversed(directory.parents), directory]:
        with contextlib.suppress(FileExistsError):
            part.mkdir(mode=0o700)
        status = part.lstat() if is_open else part.stat()
        last = part == directory
        if (is_open or last) and not (_is_ours(status) if last else _is_safe(status)):
            raise PermissionError(
                f"{part} may be changed by other users, and {directory} says which processes are killed; "
                "remove it, or name another directory"
            )
        is_open |= bool(status.st_mode & stat.S_IWOTH)
    if directory.resolve() != directory:
        _make_private(directory.resolve())


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode) and not _others_write(status)


def _is_safe(status: os.stat_result) -> bool:
    """Nobody else can put something in the place of what is ours in it: the sticky bit sees to that, too."""
    kept = bool(status.st_mode & stat.S_ISVTX) or not _others_write(status)
    return status.st_uid in (0, os.geteuid()) and stat.S_ISDIR(status.st_mode) and kept


def _others_write(status: os.stat_result) -> bool:
    return bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
