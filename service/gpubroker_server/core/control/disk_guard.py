"""Levels of a node's disks, and the choice of the files that are deleted first."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum, StrEnum
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct, field

from gpubroker_server.core.control.alarm import check_order
from gpubroker_server.core.domain.device import DiskSample, FileClass, Node, NodeSample, WatchedRoot
from gpubroker_server.core.domain.setting_marks import ELSEWHERE, Share
from gpubroker_server.core.domain.units import Instant, NodeName, Seconds
from gpubroker_server.core.world.world import World

WEEK_SECONDS = Seconds(7 * 86_400.0)
SHARD_SECONDS = Seconds(3600.0)
"""The time within which the files of one checkpoint are written."""


class DiskRules(Struct, frozen=True):
    """The used shares of a disk at which something happens. A node may have rules of its own."""

    warn: Share = 0.60
    clean: Share = 0.65
    """The used share from which the disk is cleaned, down to `warn`."""
    block: Share = 0.70
    """The used share from which nothing new starts on the node."""

    def __post_init__(self) -> None:
        """Check that the levels rise. Raises ValueError."""
        check_order("warn_percent", self.warn * 100, "clean_percent", self.clean * 100)
        check_order("clean_percent", self.clean * 100, "block_percent", self.block * 100)


class DiskLevel(IntEnum):
    """Levels of a disk, from the emptiest to the fullest. The level of a node is that of its fullest watched
    disk."""

    ROOMY = 0
    WARN = 1
    CLEAN = 2
    BLOCK = 3


def level_of(used_share: float | None, rules: DiskRules) -> DiskLevel:
    """Return the level of a used share. None means that no disk is watched, which counts as ROOMY."""
    if used_share is None or used_share < rules.warn:
        return DiskLevel.ROOMY
    if used_share < rules.clean:
        return DiskLevel.WARN
    return DiskLevel.CLEAN if used_share < rules.block else DiskLevel.BLOCK


CLASSES = tuple(FileClass)


class DiskGuard(DiskRules, frozen=True, kw_only=True):
    """The operator's choices for the disk guard. Without `roots` the guard deletes nothing."""

    overrides: Mapping[str, DiskRules] = field(default_factory=dict)
    """Scope -> rules, for single nodes (`node:NAME`) and for nodes with a label (`label:KEY=VALUE`). A node's
    own rules go before those of its labels; of these, the first that apply count."""
    old_seconds: Annotated[Seconds, Meta(ge=3600)] = WEEK_SECONDS
    """The age below which no file is deleted."""
    clean_every_seconds: Annotated[Seconds, Meta(ge=60)] = Seconds(600.0)
    """The shortest time between two cleanings of a node that no operator asked for."""
    roots: tuple[WatchedRoot, ...] = ()
    spared: Annotated[tuple[str, ...], ELSEWHERE] = ()
    """Directories of the service, in which the guard deletes nothing."""

    def rules_of(self, node: Node) -> DiskRules:
        if (own := self.overrides.get(f"node:{node.name}")) is not None:
            return own
        labels = {f"label:{key}={text}" for key, text in node.labels}
        return next((rules for scope, rules in self.overrides.items() if scope in labels), self)


FALL = 0.01
"""The distance below a level at which a disk leaves that level, so that a disk that hovers there is not
reported again and again."""


class DiskStanding(NamedTuple):
    """The state of one watched disk of a node."""

    node: NodeName
    path: str
    used_share: float
    level: DiskLevel
    threshold: float
    """The used share from which `level` begins; 0 for ROOMY."""
    at: Instant = Instant(0.0)
    """The time at which the share was measured."""


def paths_by_disk(disks: Iterable[DiskSample]) -> list[list[str]]:
    """Return the watched paths of each disk. Paths on one disk are measured by one call, so they have the
    same numbers, to the byte."""
    paths_of: dict[tuple[int, int], list[str]] = {}
    for disk in disks:
        paths_of.setdefault((disk.total_bytes, disk.free_bytes), []).append(disk.path)
    return list(paths_of.values())


def follow_disks(
    before: Mapping[tuple[NodeName, str], DiskStanding],
    guard: DiskGuard,
    nodes: Iterable[tuple[Node, NodeSample]],
) -> Iterator[DiskStanding]:
    for node, sample in nodes:
        rules = guard.rules_of(node)
        for disk in sample.disks:
            share, standing = disk.used_share, before.get((node.name, disk.path))
            level = level_of(share, rules)
            if standing is not None and standing.level > level:
                level = min(standing.level, level_of(share + FALL, rules))
            threshold = (0.0, rules.warn, rules.clean, rules.block)[level]
            yield DiskStanding(node.name, disk.path, share, level, threshold, sample.at)


def nodes_to_clean(world: World, guard: DiskGuard, fresh_since: Instant) -> list[NodeName]:
    """Return the nodes that have a root on a disk that is to be cleaned. Samples older than `fresh_since` do
    not count."""
    roots = {root.path for root in guard.roots}
    names = []
    for name, node in sorted(world.nodes.items()):
        sample = world.node_samples.get(name)
        if node.ready and sample is not None and sample.at >= fresh_since:
            share = max((disk.used_share for disk in sample.disks if disk.path in roots), default=None)
            if level_of(share, guard.rules_of(node)) >= DiskLevel.CLEAN:
                names.append(name)
    return names


class FileSeen(NamedTuple):
    """A regular file below a configured root, on that root's file system, reached without a symbolic link."""

    root: str
    path: str
    """The path below `root`."""
    file_class: FileClass
    size_bytes: int
    modified_at: Instant
    has_journal: bool = False
    """True if a `-wal` or `-journal` file of SQLite lies beside the file."""
    is_empty: bool = False
    """True for a database without rows."""
    needs_copy: bool = False
    """True if the file may be deleted only once there is a copy of it, because its root has a sync
    command."""
    is_synced: bool = False
    """True if the listing of the copy has the file with this size."""
    inode: int = 0
    modified_ns: int = 0
    """The time of `modified_at` in nanoseconds, as the file system has it."""

    @property
    def whole_path(self) -> str:
        return f"{self.root}/{self.path}"


class KeptBecause(StrEnum):
    """Reasons for which a file stays. Of several reasons, the first in the order of the checks counts."""

    YOUNG = "young"
    HAS_JOURNAL = "has_journal"
    HAS_ROWS = "has_rows"
    NEWEST_CHECKPOINT = "newest_checkpoint"
    OF_LIVE_TASK = "of_live_task"
    NOT_SYNCED = "not_synced"
    NOT_NEEDED = "not_needed"
    """Enough bytes are freed without this file."""


class Cleaning(Struct, frozen=True):
    """The files to delete, in the order of deletion, and the reasons for which the other files stay."""

    files: tuple[FileSeen, ...]
    kept: Mapping[str, int]
    """Reason -> number of files that stay."""

    @property
    def freed_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def choose(
    seen: Iterable[FileSeen],
    live_checkpoints: Iterable[str],
    needed_bytes: int,
    now: Instant,
    old_seconds: Seconds,
    why_left: Callable[[FileSeen], str],
) -> Cleaning:
    """Return the files whose deletion frees `needed_bytes`, ordered by class, and within a class the oldest
    first.

    `why_left` looks at a file itself, for example whether it is open, and returns the reason for which it
    stays; empty if it may be deleted. `live_checkpoints` has the whole paths from which unfinished tasks
    would go on: files, directories, or the common beginning of several files. The newest checkpoint of each
    directory stays as well, because the service may not know which task needs it.
    """
    files, live = list(seen), tuple(live_checkpoints)
    newest = _newest_checkpoints(files)
    kept: Counter[str] = Counter()
    may_go = []
    for file in files:
        reason = _why_kept(file, newest, live, now, old_seconds)
        if reason is None:
            may_go.append(file)
        else:
            kept[reason] += 1
    may_go.sort(key=lambda file: (CLASSES.index(file.file_class), file.modified_at, file.whole_path))
    chosen, freed_bytes = [], 0
    for file in may_go:
        if freed_bytes >= needed_bytes:
            kept[KeptBecause.NOT_NEEDED] += 1
        elif left := why_left(file):
            kept[left] += 1
        else:
            chosen.append(file)
            freed_bytes += file.size_bytes
    return Cleaning(tuple(chosen), dict(kept))


def needed_bytes(total_bytes: int, free_bytes: int, warn: float) -> int:
    """Return how many bytes must be deleted so that the used share of the disk is at most `warn`; 0 if
    none."""
    used_bytes = total_bytes - free_bytes
    return max(0, used_bytes - int(total_bytes * warn))


def _newest_checkpoints(files: Iterable[FileSeen]) -> frozenset[str]:
    """Return the whole paths of the newest complete entry of each directory, and of entries that are at most
    SHARD_SECONDS older.

    An entry of a directory is a file in it, or a subdirectory with all its files. An entry of less than half
    the size of the largest is not complete: it is a mark, an index, or the rest of a crash. A directory
    directly below the root holds the checkpoints of one job, so it is no entry itself. Any other directory
    that was written within SHARD_SECONDS is itself one checkpoint. Of such a directory only the newest entry
    is kept; of equally new entries, the last by name.
    """
    entries_of: dict[str, dict[str, tuple[Instant, int]]] = {}
    oldest: dict[str, Instant] = {}
    for file in files:
        if file.file_class is FileClass.CHECKPOINT:
            for directory, entry in _entries(file):
                oldest[directory] = min(oldest.get(directory, file.modified_at), file.modified_at)
                entries = entries_of.setdefault(directory, {})
                at, size_bytes = entries.get(entry, (file.modified_at, 0))
                entries[entry] = max(at, file.modified_at), size_bytes + file.size_bytes
    newest_paths: set[str] = set()
    for directory, entries in entries_of.items():
        largest = max(size_bytes for _, size_bytes in entries.values())
        order = {entry: (modified_at, entry) for entry, (modified_at, _) in entries.items()}
        newest = max(order[entry] for entry, (_, size_bytes) in entries.items() if 2 * size_bytes >= largest)
        first = Instant(newest[0] - SHARD_SECONDS), ""
        if oldest[directory] >= first[0] and directory in entries_of.get(directory.rpartition("/")[0], ()):
            first = newest
        newest_paths.update(entry for entry, place in order.items() if place >= first)
    return frozenset(newest_paths)


def _entries(file: FileSeen) -> Iterator[tuple[str, str]]:
    """Yield each directory above the file, with the entry of that directory that is the file or contains it.
    Both are whole paths."""
    entry = file.whole_path
    while entry != file.root:
        directory = entry.rpartition("/")[0]
        if directory != file.root or entry == file.whole_path:
            yield directory, entry
        entry = directory


def _is_in(file: FileSeen, places: frozenset[str]) -> bool:
    """Return True if the file, or a directory that holds it, is one of these whole paths."""
    parts = file.whole_path.split("/")
    return any("/".join(parts[:end]) in places for end in range(2, len(parts) + 1))


def _why_kept(
    file: FileSeen, newest: frozenset[str], live: tuple[str, ...], now: Instant, old_seconds: Seconds
) -> KeptBecause | None:
    if now - file.modified_at < old_seconds:
        return KeptBecause.YOUNG
    if file.whole_path.startswith(live):
        return KeptBecause.OF_LIVE_TASK
    match file.file_class:
        case FileClass.EMPTY_DATABASE if file.has_journal:
            return KeptBecause.HAS_JOURNAL
        case FileClass.EMPTY_DATABASE if not file.is_empty:
            return KeptBecause.HAS_ROWS
        case FileClass.CHECKPOINT if _is_in(file, newest):
            return KeptBecause.NEWEST_CHECKPOINT
    if (file.needs_copy or file.file_class is FileClass.REDUNDANT) and not file.is_synced:
        return KeptBecause.NOT_SYNCED
    return None
