"""The disk guard of one node: which files may go, and their deletion, when the leader asks.

In a thread of its own, one question at a time: a file system that hangs holds up nothing else.
"""

import asyncio
import errno
import fcntl
import hashlib
import os
import select
import signal
import stat
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import structlog
from gpubroker.runtime.messages import Report

from gpubroker_server.adapters.ray.agent.disk_walk import (
    _FILE,
    Entry,
    FileId,
    Unsafe,
    Walk,
    file_id,
    is_empty_database,
    mount_of,
    open_files,
    opened,
    opened_directory_of,
    opened_root,
)
from gpubroker_server.adapters.ray.agent.host_meter import room_of
from gpubroker_server.core.control.disk_guard import DiskRules, FileSeen, choose, needed_bytes
from gpubroker_server.core.domain.device import FileClass, FoundFile, WatchedRoot
from gpubroker_server.core.domain.units import Instant, Seconds

log = structlog.get_logger("gpubroker.agent")

MOST_FILES = 100_000
"""Of each root, in one look."""
MOST_DELETED = 1_000
"""In one pass."""
PASS_SECONDS = 600.0
"""Besides the sync commands."""
LISTING_BYTES = 64 * 2**20


class DiskTask(NamedTuple):
    """What a `disk` order asks, as it travels."""

    request: str
    roots: tuple[WatchedRoot, ...]
    spared: tuple[str, ...]
    warn: float
    old_seconds: float
    deletes: tuple[FoundFile, ...] | None
    runs_sync: bool
    live: tuple[str, ...]

    @classmethod
    def of(cls, values: Sequence[Any]) -> "DiskTask":
        request, roots, spared, warn, old_seconds, deletes, runs_sync, live = values
        found = None if deletes is None else tuple(_found(*one) for one in deletes)
        watched = tuple(WatchedRoot(one[0], FileClass(one[1]), *one[2:]) for one in roots)
        return cls(request, watched, spared, warn, old_seconds, found, runs_sync, live)

    @property
    def digest(self) -> str:
        """Of the configuration."""
        about = self.roots, self.spared, self.warn, self.old_seconds
        return hashlib.sha256(repr(about).encode()).hexdigest()


def _found(root: str, path: str, file_class: str, *rest: int) -> FoundFile:
    return FoundFile(root, path, FileClass(file_class), *rest)


class Answer(NamedTuple):
    files: Sequence[FoundFile] = ()
    kept: Mapping[str, int] = {}
    is_first: bool = False
    message: str = ""


class DiskCleaner:
    def __init__(self, folder: Path, report: Callable[[Report], None]) -> None:
        """`folder`: where the agent keeps its records."""
        self._folder = folder
        self._report = report
        self._thread = ThreadPoolExecutor(1, "disk guard")
        self._job: asyncio.Task[None] | None = None

    def take(self, values: Sequence[Any]) -> None:
        """Answer an order with a report, some time later; at once if it is busy."""
        task = DiskTask.of(values)
        if self._job is not None:
            self._tell(
                task, Answer(message="the node's agent is busy with another look at its disks; ask again")
            )
            return
        self._job = asyncio.create_task(self._do(task))

    async def _do(self, task: DiskTask) -> None:
        """A thread that hangs keeps it busy."""
        loop = asyncio.get_running_loop()
        seconds = PASS_SECONDS + sum(root.sync_seconds for root in task.roots if task.runs_sync)
        working = loop.run_in_executor(self._thread, self.answer, task)
        try:
            self._tell(task, await asyncio.wait_for(asyncio.shield(working), seconds))
        except TimeoutError:
            self._tell(task, Answer(message=f"its disks did not answer within {seconds:g} s"))
            await asyncio.wait([working])
        finally:
            self._job = None

    def answer(self, task: DiskTask) -> Answer:
        try:
            return self._look(task) if task.deletes is None else self._delete(task, task.deletes)
        except (OSError, Unsafe) as fault:
            return Answer(message=str(fault))
        except Exception as fault:
            log.exception("looking at the disks failed")
            return Answer(message=repr(fault))

    def _tell(self, task: DiskTask, answer: Answer) -> None:
        files = [tuple(one) for one in answer.files]
        kept = sorted((str(why), count) for why, count in answer.kept.items())
        self._report(("disk", time.time(), task.request, files, kept, answer.is_first, answer.message))

    def _look(self, task: DiskTask) -> Answer:
        """The first with this configuration is remembered, once it has looked at what may go."""
        spared = self._spared(task)
        messages: list[str] = []
        seen: dict[int, list[FileSeen]] = {}
        needed: dict[int, int] = {}
        is_open = open_files()
        rules = DiskRules(task.warn, old_seconds=Seconds(task.old_seconds))
        for root in task.roots:
            try:
                total_bytes, free_bytes = room_of(root.path)
                files = list(self._files_of(root, task, spared, is_open, messages))
                device = os.stat(root.path).st_dev
            except (OSError, Unsafe) as fault:
                messages.append(f"{root.path}: {getattr(fault, 'strerror', None) or fault}")
                continue
            needed[device] = needed_bytes(total_bytes, free_bytes, rules)
            seen.setdefault(device, []).extend(files)
        chosen: list[FileSeen] = []
        kept: Counter[str] = Counter()
        live = {form for path in task.live for form in (path, os.path.realpath(path))}
        for device, files in seen.items():
            cleaning = choose(files, live, needed[device], Instant(time.time()), rules)
            chosen += cleaning.files
            kept.update({str(why): count for why, count in cleaning.kept.items()})
        if len(chosen) > MOST_DELETED:
            kept["next_pass"] += len(chosen) - MOST_DELETED
        is_first = self._known() != task.digest
        if task.runs_sync and is_first:
            self._remember(task.digest)
        found = []
        for one in chosen[:MOST_DELETED]:
            file = FoundFile(one.root, one.path, one.file_class, one.size_bytes, one.modified_ns, one.inode)
            if why := self._left_because(file, task, spared, deletes=False):
                kept[why] += 1
            else:
                found.append(file)
        return Answer(found, kept, is_first, "; ".join(messages))

    def _files_of(
        self,
        root: WatchedRoot,
        task: DiskTask,
        spared: frozenset[FileId],
        is_open: frozenset[FileId],
        messages: list[str],
    ) -> Iterator[FileSeen]:
        walk = Walk(root.path, MOST_FILES, spared)
        walk.run()
        synced: Mapping[str, int] = {}
        if root.file_class is FileClass.REDUNDANT and task.runs_sync:
            try:
                synced = listing_of(root)  # of files that are known by now: what takes the place of one stays
            except Unsafe as fault:
                messages.append(str(fault))
        if not walk.is_complete:
            messages.append(
                f"{root.path}: not all of it could be read, or it has more than {MOST_FILES} files"
            )
            if root.file_class is FileClass.CHECKPOINT:
                return  # the newest one may be among what was not seen
        for entry in walk.entries:
            yield self._seen(root, entry, task, spared, is_open, synced)

    def _seen(
        self,
        root: WatchedRoot,
        entry: Entry,
        task: DiskTask,
        spared: frozenset[FileId],
        is_open: frozenset[FileId],
        synced: Mapping[str, int],
    ) -> FileSeen:
        status, is_database = entry.status, root.file_class is FileClass.EMPTY_DATABASE
        is_held = file_id(status) in is_open
        may_go = is_database and not (is_held or entry.has_journal)
        is_old = time.time() - status.st_mtime >= task.old_seconds
        return FileSeen(
            root.path,
            entry.path,
            root.file_class,
            status.st_size,
            Instant(status.st_mtime),
            is_held,
            entry.has_journal,
            is_empty=may_go and is_old and is_empty_database(root.path, entry.path, spared),
            is_synced=synced.get(entry.path) == status.st_size,
            inode=status.st_ino,
            modified_ns=max(0, status.st_mtime_ns),
        )

    def _delete(self, task: DiskTask, files: Sequence[FoundFile]) -> Answer:
        """What has not changed since it was found, is below a root of the order, and is not open."""
        if self._known() != task.digest:
            raise Unsafe("nothing is deleted in the first pass after a change of configuration")
        spared = self._spared(task)
        roots = {root.path: root.file_class for root in task.roots}
        live = {form for path in task.live for form in (path, os.path.realpath(path))}
        gone: list[FoundFile] = []
        kept: Counter[str] = Counter()
        until = time.monotonic() + PASS_SECONDS
        for file in files[:MOST_DELETED]:
            if time.monotonic() > until:
                kept["next_pass"] += 1
            elif roots.get(file.root) is not file.file_class or _is_live(file, live):
                kept["of_live_task"] += 1
            elif why := self._left_because(file, task, spared, deletes=True):
                kept[why] += 1
            else:
                gone.append(file)
                log.info("deleted", path=file.whole_path)
        return Answer(gone, kept)

    def _left_because(
        self, file: FoundFile, task: DiskTask, spared: frozenset[FileId], *, deletes: bool
    ) -> str:
        """Empty: it may go, and has gone if this `deletes`."""
        name = file.path.rpartition("/")[2]
        try:
            with (
                opened_root(file.root, spared) as (root, mount),
                opened_directory_of(root, file.path, mount, spared) as directory,
                opened(name, _FILE, directory) as held,
            ):
                status = os.fstat(held)
                same = file.inode, file.modified_ns, file.size_bytes
                if not stat.S_ISREG(status.st_mode) or mount_of(held) != mount:
                    return "changed"
                if (status.st_ino, status.st_mtime_ns, status.st_size) != same:
                    return "changed"
                if time.time() - status.st_mtime < task.old_seconds:
                    return "young"
                if file.file_class is FileClass.EMPTY_DATABASE and _has_journal(name, directory):
                    return "has_journal"
                with not_opened_by_others(held) as is_ours:
                    if not is_ours:
                        return "may_be_open" if is_ours is None else "open"
                    if file_id(os.stat(name, dir_fd=directory, follow_symlinks=False)) != file_id(status):
                        return "changed"
                    if deletes:
                        os.unlink(name, dir_fd=directory)
        except (OSError, Unsafe) as fault:
            log.warning("a file is left", path=file.whole_path, fault=str(fault))
            return "changed"
        return ""

    def _spared(self, task: DiskTask) -> frozenset[FileId]:
        """Directories of the service, whatever names they have here."""
        found = set()
        for path in (*task.spared, str(self._folder)):
            try:
                found.add(file_id(os.stat(path)))
            except FileNotFoundError:
                continue
        return frozenset(found)

    @property
    def _memory(self) -> Path:
        return self._folder / "disk-guard"

    def _known(self) -> str:
        return self._memory.read_text() if self._memory.exists() else ""

    def _remember(self, digest: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._memory.write_text(digest)


def listing_of(root: WatchedRoot) -> Mapping[str, int]:
    """Run the sync command in the root. Path below the root -> size, of each file that its copy has. Raises
    Unsafe if it fails, or prints anything else than lines `SIZE PATH`."""
    said = f"{root.path}: its sync command {root.sync_command[0]}"
    try:
        with subprocess.Popen(  # noqa: S603  # the operator's
            root.sync_command, cwd=root.path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                printed = _printed(process, root.sync_seconds)
            except (Unsafe, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started
                raise
    except (OSError, Unsafe, subprocess.TimeoutExpired) as fault:
        raise Unsafe(f"{said} failed: {fault}") from None
    if process.returncode:
        raise Unsafe(f"{said} ended with {process.returncode}")
    listing = {}
    for line in os.fsdecode(printed).splitlines():
        size, _, path = line.partition(" ")
        if not size.isdecimal() or not path:
            raise Unsafe(
                f"{said} printed {line[:80]!r}; each line has to be a size in bytes, a space and a path"
            )
        listing[path] = int(size)
    return listing


def _printed(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """All that it prints until it ends. Raises TimeoutExpired, and Unsafe if that is too much."""
    assert process.stdout is not None
    output, printed, until = process.stdout.fileno(), bytearray(), time.monotonic() + seconds
    readable = select.poll()
    readable.register(output)
    while len(printed) <= LISTING_BYTES:
        if not readable.poll(1000 * max(0.0, until - time.monotonic())):
            raise subprocess.TimeoutExpired(process.args, seconds)
        if not (part := os.read(output, 65_536)):
            process.wait(max(0.0, until - time.monotonic()))
            return bytes(printed)
        printed += part
    raise Unsafe(f"it printed more than {LISTING_BYTES} bytes")


def _is_live(file: FoundFile, live: set[str]) -> bool:
    parts = file.whole_path.split("/")
    return any("/".join(parts[:end]) in live for end in range(2, len(parts) + 1))


def _has_journal(name: str, directory: int) -> bool:
    for beside in (f"{name}-wal", f"{name}-journal"):
        try:
            os.stat(beside, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            continue
        return True
    return False


@contextmanager
def not_opened_by_others(held: int) -> Iterator[bool | None]:
    """Whether nothing else has the file open; while this lasts, the kernel lets nothing else open it. None
    where the file system has no such leases, or lets only the file's owner have them."""
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
