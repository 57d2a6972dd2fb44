"""The disk guard of one node: it finds files that may be deleted, and deletes them when the leader orders it.

The guard answers one question at a time, in a thread of its own. File systems that do not answer are left
out.
"""

import asyncio
import hashlib
import os
import select
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import structlog
from gpubroker.runtime.messages import Report
from msgspec.structs import replace

from gpubroker_server.adapters.ray.agent.disk_walk import (
    _FILE,
    FileId,
    Unsafe,
    Walk,
    deleted,
    file_id,
    is_at,
    is_empty_database,
    is_named,
    mount_of,
    mount_point_of,
    not_opened_by_others,
    opened,
    opened_directory_of,
    opened_root,
    own_names,
)
from gpubroker_server.adapters.ray.agent.host_meter import FileQuestion, room_of
from gpubroker_server.core.control.disk_guard import FileSeen, choose, needed_bytes
from gpubroker_server.core.domain.device import DiskQuestion, DiskSample, FileClass, FoundFile, WatchedRoot
from gpubroker_server.core.domain.units import Instant

log = structlog.get_logger("gpubroker.agent")

MAX_FILES = 100_000
"""The most files of each root that one pass examines."""
MAX_DELETED = 1_000
"""The most files that one pass deletes."""
PASS_SECONDS = 600.0
"""The time limit of a pass, not counting the sync commands."""
LISTING_BYTES = 64 * 2**20
ANSWER_SECONDS = 5.0
"""A root is left out if it does not tell its free space within this time."""


class DiskTask(DiskQuestion, frozen=True, kw_only=True):
    """A question of the leader, with the mounts that do not answer now."""

    away: tuple[str, ...] = ()
    """The mount points of file systems that do not answer."""

    @classmethod
    def of(cls, values: Sequence[Any]) -> "DiskTask":
        """Return the task for the values of a `disk` order."""
        request, roots, spared, warn, old_seconds, deletes, runs_sync, live, above = values
        to_delete = None if deletes is None else tuple(_found(*file) for file in deletes)
        watched = tuple(WatchedRoot(root[0], FileClass(root[1]), *root[2:]) for root in roots)
        return cls(request, watched, spared, warn, old_seconds, to_delete, runs_sync, live, above)

    def live_at(self, root: str, files: Iterable[str]) -> set[str]:
        """Return the paths of live checkpoints below this root. `files` are the paths of the files there."""
        return own_names(root, files, (path for path in self.live if not is_at(path, self.away)))

    def digest(self, root: WatchedRoot) -> str:
        """Return a digest of the configuration of one of the task's roots."""
        about = root, self.spared, self.warn, self.old_seconds
        return hashlib.sha256(repr(about).encode()).hexdigest()


def _found(root: str, path: str, file_class: str, *rest: int) -> FoundFile:
    return FoundFile(root, path, FileClass(file_class), *rest)


def _found_as(seen: FileSeen) -> FoundFile:
    return FoundFile(seen.root, seen.path, seen.file_class, seen.size_bytes, seen.modified_ns, seen.inode)


class Answer(NamedTuple):
    files: Sequence[FoundFile] = ()
    kept: Mapping[str, int] = {}
    is_first: bool = False
    message: str = ""


BUSY = Answer(message="the node's agent is busy with another look at its disks; ask again")


class DiskCleaner:
    def __init__(self, folder: Path, report: Callable[[Report], None]) -> None:
        """`folder` is the directory in which the agent keeps its records."""
        self._folder = folder
        self._report = report
        self._thread = ThreadPoolExecutor(1, "disk guard")
        self._jobs: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self._questions: dict[str, FileQuestion] = {}
        """The question for the free space of each root."""

    def take(self, values: Sequence[Any]) -> None:
        """Answer an order with a report later. An order that neither cleans nor deletes is refused at once
        if the guard is busy, because clients may send any number of them; other orders wait."""
        task = DiskTask.of(values)
        if self._jobs and task.deletes is None and not task.runs_sync:
            self._tell(task, BUSY)
        else:
            self._jobs.add(asyncio.create_task(self._in_turn(task)))

    async def _in_turn(self, task: DiskTask) -> None:
        try:
            async with asyncio.timeout(PASS_SECONDS) as waiting, self._turn:
                waiting.reschedule(None)
                await self._do(task)
        except TimeoutError:
            self._tell(task, BUSY)
        finally:
            self._jobs -= {asyncio.current_task()}

    async def _do(self, task: DiskTask) -> None:
        """Run one pass and report its answer. If the thread hangs at a file system, it is replaced and the
        next pass leaves that file system out; if it hangs for another reason, the guard stays busy."""
        loop = asyncio.get_running_loop()
        syncs = [root for root in task.roots if task.runs_sync and root.sync_command]
        seconds = PASS_SECONDS + sum(root.sync_seconds for root in syncs)
        try:
            asked = replace(task, away=await self._away(task))
            working = loop.run_in_executor(self._thread, self.answer, asked)
            self._tell(task, await asyncio.wait_for(asyncio.shield(working), seconds))
        except TimeoutError:
            unanswered = await self._away(task)
            subject = ", ".join(unanswered) or "its disks"
            self._tell(task, Answer(message=f"{subject} did not answer within {seconds:g} s"))
            if unanswered:
                self._thread = ThreadPoolExecutor(1, "disk guard")
            else:
                await asyncio.wait([working])

    async def _away(self, task: DiskTask) -> tuple[str, ...]:
        paths = [root.path for root in task.roots]
        self._questions = {path: self._questions.get(path) or FileQuestion(path, room_of) for path in paths}
        asked = {path: question.begin() for path, question in self._questions.items()}
        if waited := [answer for answer in asked.values() if answer is not None]:
            await asyncio.wait(waited, timeout=ANSWER_SECONDS)
        unanswered = (path for path, answer in asked.items() if answer is None or not answer.done())
        return tuple(sorted({mount_point_of(path) for path in unanswered}))

    def answer(self, task: DiskTask) -> Answer:
        try:
            return self._look(task) if task.deletes is None else self._delete(task, task.deletes)
        except (OSError, Unsafe) as fault:
            return Answer(message=str(fault))
        except Exception as fault:
            log.exception("looking at the disks failed")
            return Answer(message=repr(fault))

    def _tell(self, task: DiskTask, answer: Answer) -> None:
        files = [tuple(file) for file in answer.files]
        kept = sorted((str(reason), count) for reason, count in answer.kept.items())
        self._report(("disk", time.time(), task.request, files, kept, answer.is_first, answer.message))

    def _look(self, task: DiskTask) -> Answer:
        """Return the files that may be deleted. The first cleaning pass at a root with a new configuration
        only lists them, and its configuration is remembered."""
        spared = self._spared(task)
        known, looked = self._known(), set[str]()
        messages: list[str] = []
        seen: dict[int, list[FileSeen]] = {}
        needed: dict[int, int] = {}
        live: set[str] = set()
        for root in task.roots:
            if is_at(root.path, task.away):
                messages.append(f"{root.path} does not answer and is left out")
                continue
            try:
                disk = DiskSample(root.path, *room_of(root.path))
                if disk.used_share < task.above:
                    continue
                files = list(self._files_of(root, task, spared, messages))
                device = os.stat(root.path).st_dev
                live |= task.live_at(root.path, (file.path for file in files))
            except (OSError, Unsafe) as fault:
                messages.append(f"{root.path}: {getattr(fault, 'strerror', None) or fault}")
                continue
            looked.add(task.digest(root))
            needed[device] = needed_bytes(disk.total_bytes, disk.free_bytes, task.warn)
            seen.setdefault(device, []).extend(files)
        chosen: list[FoundFile] = []
        kept: Counter[str] = Counter()
        for device, files in seen.items():
            cleaning = choose(
                files, live, needed[device], Instant(time.time()), task.old_seconds,
                lambda file: self._left_because(_found_as(file), task, spared, deletes=False),
            )  # fmt: skip
            chosen += map(_found_as, cleaning.files)
            kept.update(cleaning.kept)
        if len(chosen) > MAX_DELETED:
            kept["next_pass"] += len(chosen) - MAX_DELETED
        is_first = not looked <= known
        if task.runs_sync and is_first:
            self._remember(looked | (known & {task.digest(root) for root in task.roots}))
        return Answer(chosen[:MAX_DELETED], kept, is_first, "; ".join(messages))

    def _files_of(
        self, root: WatchedRoot, task: DiskTask, spared: frozenset[FileId], messages: list[str]
    ) -> Iterator[FileSeen]:
        """Yield the files of a root. Raises OSError, and Unsafe if nothing below this root may be deleted."""
        walk = Walk(root.path, MAX_FILES, spared)
        walk.run()
        synced: Mapping[str, int] = {}
        if root.sync_command and task.runs_sync:
            # The sync command runs after the walk, so that it has copied every file that the walk found.
            synced = listing_of(root)
        if not walk.is_complete:
            message = f"not all of it could be read, or it has more than {MAX_FILES} files"
            if root.file_class is FileClass.CHECKPOINT:
                raise Unsafe(message)  # the newest checkpoint may be among the files that were not seen
            messages.append(f"{root.path}: {message}")
        for path, status, has_journal in walk.entries:
            may_be_empty = root.file_class is FileClass.EMPTY_DATABASE and not has_journal
            is_old = time.time() - status.st_mtime >= task.old_seconds
            yield FileSeen(
                root.path,
                path,
                root.file_class,
                status.st_size,
                Instant(status.st_mtime),
                has_journal,
                is_empty=may_be_empty and is_old and is_empty_database(root.path, path, spared),
                needs_copy=bool(root.sync_command),
                is_synced=synced.get(path) == status.st_size,
                inode=status.st_ino,
                modified_ns=max(0, status.st_mtime_ns),
            )

    def _delete(self, task: DiskTask, files: Sequence[FoundFile]) -> Answer:
        """Delete those files that have not changed since they were listed, are below a root of the order,
        and are not open."""
        known, spared = self._known(), self._spared(task)
        shown = {(root.path, root.file_class) for root in task.roots if task.digest(root) in known}
        if not shown.issuperset((file.root, file.file_class) for file in files):
            raise Unsafe("nothing is deleted in the first pass after a change of configuration")
        live: set[str] = set()
        for root in {file.root for file in files if not is_at(file.root, task.away)}:
            live |= task.live_at(root, (file.path for file in files if file.root == root))
        deleted: list[FoundFile] = []
        kept: Counter[str] = Counter()
        until = time.monotonic() + PASS_SECONDS
        for file in files[:MAX_DELETED]:
            if time.monotonic() > until:
                kept["next_pass"] += 1
            elif is_at(file.root, task.away):
                kept["does_not_answer"] += 1
            elif file.whole_path.startswith(tuple(live)):
                kept["of_live_task"] += 1
            elif reason := self._left_because(file, task, spared, deletes=True):
                kept[reason] += 1
            else:
                deleted.append(file)
                log.info("deleted", path=file.whole_path)
        return Answer(deleted, kept)

    def _left_because(
        self, file: FoundFile, task: DiskTask, spared: frozenset[FileId], *, deletes: bool
    ) -> str:
        """Return the reason why a file stays. It is empty if the file may be deleted; with `deletes`, the
        file then has been deleted."""
        name = file.path.rpartition("/")[2]
        try:
            with (
                opened_root(file.root, spared) as (root, mount),
                opened_directory_of(root, file.path, mount, spared) as directory,
                opened(name, _FILE, directory) as held,
                not_opened_by_others(held) as is_ours,
            ):
                if not is_ours:
                    return "may_be_open" if is_ours is None else "open"
                status = os.fstat(held)  # nothing else opens the file from here on
                same = file.inode, file.modified_ns, file.size_bytes
                if mount_of(held) != mount or not is_named(held, name, directory):
                    return "changed"
                if (status.st_ino, status.st_mtime_ns, status.st_size) != same:
                    return "changed"
                if time.time() - status.st_mtime < task.old_seconds:
                    return "young"
                if status.st_nlink > 1:
                    return "has_links"  # its deletion would free no space
                if file.file_class is FileClass.EMPTY_DATABASE and _has_journal(name, directory):
                    return "has_journal"
                if deletes and not deleted(held, name, directory):
                    return "changed"
        except (OSError, Unsafe) as fault:
            log.warning("a file is left", path=file.whole_path, fault=str(fault))
            return "changed"
        return ""

    def _spared(self, task: DiskTask) -> frozenset[FileId]:
        """Return the directories of the service, which are never entered. They are identified by device and
        inode, because they may have other names."""
        directories = set()
        for path in (*task.spared, str(self._folder)):
            try:
                directories.add(file_id(os.stat(path)))
            except FileNotFoundError:
                continue
        return frozenset(directories)

    @property
    def _memory(self) -> Path:
        return self._folder / "disk-guard"

    def _known(self) -> set[str]:
        return set(self._memory.read_text().split()) if self._memory.exists() else set()

    def _remember(self, digests: set[str]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._memory.write_text("\n".join(digests))


def listing_of(root: WatchedRoot) -> Mapping[str, int]:
    """Run the sync command in the root, and return the size of each file that the copy has, by its path
    below the root. Raises Unsafe if the command fails, or does not print `SIZE PATH` and a NUL byte for each
    file. The NUL byte ends an entry, because names may contain line breaks."""
    command = f"its sync command {root.sync_command[0]}"
    try:
        with subprocess.Popen(  # noqa: S603  # the operator's
            root.sync_command, cwd=root.path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                printed = _printed(process, root.sync_seconds)
            except (Unsafe, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)  # this ends its children too
                raise
    except (OSError, Unsafe, subprocess.TimeoutExpired) as fault:
        raise Unsafe(f"{command} failed: {fault}") from None
    if process.returncode:
        raise Unsafe(f"{command} ended with {process.returncode}")
    listing = {}
    *entries, rest = os.fsdecode(printed).split("\0")
    for entry in [*entries, *([rest] if rest else [])]:
        size, _, path = entry.partition(" ")
        if rest or not size.isdecimal() or not path:
            raise Unsafe(
                f"{command} printed {entry[:80]!r}; each file has to be a size in bytes, a space, its path "
                "and a NUL byte"
            )
        listing[path] = int(size)
    return listing


def _printed(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """Return all that the process prints until it ends. Raises TimeoutExpired, and Unsafe if the output has
    more than LISTING_BYTES."""
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


def _has_journal(name: str, directory: int) -> bool:
    for journal in (f"{name}-wal", f"{name}-journal"):
        try:
            os.stat(journal, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            continue
        return True
    return False
