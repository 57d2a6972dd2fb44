"""How full a node's disks may become, and which files go first."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple

from gpubroker_server.core.domain.units import Instant, Seconds

WEEK_SECONDS = Seconds(7 * 86_400.0)


class DiskRules(NamedTuple):
    """Shares of a disk that is in use. A node may have rules of its own."""

    warn: float = 0.60
    clean: float = 0.65
    """From here on it is cleaned, down to `warn`."""
    block: float = 0.70
    """From here on nothing new starts on the node."""
    old_seconds: Seconds = WEEK_SECONDS
    """Younger files stay, whatever they are."""


class DiskLevel(IntEnum):
    ROOMY = 0
    WARN = 1
    CLEAN = 2
    BLOCK = 3


def level_of(used_share: float | None, rules: DiskRules) -> DiskLevel:
    """None: nothing is watched."""
    if used_share is None or used_share < rules.warn:
        return DiskLevel.ROOMY
    if used_share < rules.clean:
        return DiskLevel.WARN
    return DiskLevel.CLEAN if used_share < rules.block else DiskLevel.BLOCK


class FileClass(StrEnum):
    """In the order in which they are deleted."""

    LOG = "log"
    EMPTY_DATABASE = "empty_database"
    """A SQLite file without a row."""
    CHECKPOINT = "checkpoint"
    REDUNDANT = "redundant"
    """The operator's sync command has confirmed that there is a copy elsewhere."""


CLASSES = tuple(FileClass)


class FileSeen(NamedTuple):
    """A regular file below a configured root, on that root's file system, reached without a symbolic link."""

    root: str
    path: str
    """Below the root."""
    file_class: FileClass
    size_bytes: int
    modified_at: Instant
    is_open: bool = False
    has_journal: bool = False
    """SQLite's `-wal` or `-journal` lies beside it."""
    is_empty: bool = False
    """Of a database: it has no row."""
    is_synced: bool = False
    """The listing of the copy has it, with this size."""

    @property
    def directory(self) -> str:
        return f"{self.root}/{self.path}".rpartition("/")[0]

    @property
    def whole_path(self) -> str:
        return f"{self.root}/{self.path}"


class KeptBecause(StrEnum):
    """Why a file is left where it is; the first that applies."""

    OPEN = "open"
    YOUNG = "young"
    HAS_JOURNAL = "has_journal"
    HAS_ROWS = "has_rows"
    NEWEST_CHECKPOINT = "newest_checkpoint"
    OF_LIVE_TASK = "of_live_task"
    NOT_SYNCED = "not_synced"
    NOT_NEEDED = "not_needed"
    """Enough goes without it."""


@dataclass(frozen=True, slots=True)
class Cleaning:
    """What would go, in this order, and why the rest stays."""

    files: tuple[FileSeen, ...]
    kept: Mapping[KeptBecause, int]
    """How many files."""

    @property
    def freed_bytes(self) -> int:
        return sum(one.size_bytes for one in self.files)


def choose(
    seen: Iterable[FileSeen],
    live_checkpoints: Iterable[str],
    needed_bytes: int,
    now: Instant,
    rules: DiskRules,
) -> Cleaning:
    """The files that free `needed_bytes`, by class and the oldest first.

    `live_checkpoints`: whole paths from which tasks that are not over would go on. The newest checkpoint of
    each directory stays as well: whose it is may be known to its owner alone.
    """
    files, live = list(seen), frozenset(live_checkpoints)
    newest = _newest_checkpoints(files)
    kept: Counter[KeptBecause] = Counter()
    may_go = []
    for one in files:
        why = _why_kept(one, newest, live, now, rules)
        if why is None:
            may_go.append(one)
        else:
            kept[why] += 1
    may_go.sort(key=lambda one: (CLASSES.index(one.file_class), one.modified_at, one.whole_path))
    chosen, freed_bytes = [], 0
    for one in may_go:
        if freed_bytes >= needed_bytes:
            kept[KeptBecause.NOT_NEEDED] += 1
            continue
        chosen.append(one)
        freed_bytes += one.size_bytes
    return Cleaning(tuple(chosen), dict(kept))


def needed_bytes(total_bytes: int, free_bytes: int, rules: DiskRules) -> int:
    """What has to go so that the disk is used up to `warn` only; 0 if nothing has."""
    used_bytes = total_bytes - free_bytes
    return max(0, used_bytes - int(total_bytes * rules.warn))


def _newest_checkpoints(files: Iterable[FileSeen]) -> frozenset[str]:
    """Whole paths: the newest in each directory; of equally new ones the last by name."""
    newest: dict[str, FileSeen] = {}
    for one in files:
        known = newest.get(one.directory)
        if one.file_class is FileClass.CHECKPOINT and (
            known is None or (one.modified_at, one.path) > (known.modified_at, known.path)
        ):
            newest[one.directory] = one
    return frozenset(one.whole_path for one in newest.values())


def _why_kept(
    one: FileSeen, newest: frozenset[str], live: frozenset[str], now: Instant, rules: DiskRules
) -> KeptBecause | None:
    if one.is_open:
        return KeptBecause.OPEN
    if now - one.modified_at < rules.old_seconds:
        return KeptBecause.YOUNG
    match one.file_class:
        case FileClass.EMPTY_DATABASE if one.has_journal:
            return KeptBecause.HAS_JOURNAL
        case FileClass.EMPTY_DATABASE if not one.is_empty:
            return KeptBecause.HAS_ROWS
        case FileClass.CHECKPOINT if one.whole_path in live:
            return KeptBecause.OF_LIVE_TASK
        case FileClass.CHECKPOINT if one.whole_path in newest:
            return KeptBecause.NEWEST_CHECKPOINT
        case FileClass.REDUNDANT if not one.is_synced:
            return KeptBecause.NOT_SYNCED
    return None
