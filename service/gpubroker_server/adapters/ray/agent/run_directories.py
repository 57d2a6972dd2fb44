"""The directories of runs on this node: the copy of an upload in which a run works, and the outputs that are
collected from it when the run is gone."""

import asyncio
import contextlib
import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog
from gpubroker.runtime.archives import ArchiveLimits
from gpubroker.runtime.messages import Report, RunKey, RunOrder
from msgspec import Struct

from gpubroker_server.adapters.ray.agent.run_outputs import RunOutputs
from gpubroker_server.adapters.ray.agent.shared_objects import Failed, SharedObjects
from gpubroker_server.adapters.ray.agent.uploads import Owner, UploadCache, remove_tree
from gpubroker_server.adapters.ray.options import AgentConfig

log = structlog.get_logger("gpubroker.agent")

FAILED = "object_unreadable"
"""The kind of the failure of a run whose directory cannot be prepared. Another node may have room for it."""

Prepared = Callable[[RunKey, str, Failed | None], None]
"""Receives the directory of a run, or the failure if the run gets none."""
Do = Callable[[str, Callable[[], Coroutine[Any, Any, None]]], None]


class DirectoryRecord(Struct, frozen=True):
    """A record of a run's directory for a later agent. A field that is added has a default."""

    task: str
    fence: int
    rank: int
    directory: str
    is_copy: bool
    """True if the directory was made for this run, and is removed after it."""
    outputs: tuple[str, ...] = ()

    @property
    def key(self) -> RunKey:
        return RunKey(self.task, self.fence, self.rank)


class RunDirectories:
    """Prepares and removes the directories of runs. All methods run on one event loop; files are copied in
    threads."""

    def __init__(
        self, config: AgentConfig, report: Callable[[Report], None], prepared: Prepared, do: Do
    ) -> None:
        """`do` runs a job in the background and repeats it until it succeeds."""
        self._config = config
        self._root = work_directory(config)
        self._prepared = prepared
        self._do = do
        limits = ArchiveLimits(config.upload_bytes, config.upload_files)
        self._cache = UploadCache(self._root / "uploads", limits, config.upload_cache_mb * 2**20)
        # No object is kept in memory, because the unpacked files are on disk.
        self.objects = SharedObjects(0, self._unpack, report, self._on_unpacked)
        self.outputs = RunOutputs(config, self._root / "outputs", report, self._on_sent)
        self._records: dict[RunKey, DirectoryRecord] = {}
        self._preparing: dict[RunKey, RunOrder] = {}
        self._copying: set[RunKey] = set()
        self._ending: set[RunKey] = set()
        self._is_open = False

    @property
    def is_preparing(self) -> bool:
        return bool(self._preparing)

    def prepares(self, key: RunKey) -> bool:
        """Return True if the run waits for its directory."""
        return key in self._preparing

    def prepare(self, order: RunOrder) -> None:
        """Begin to make a copy of the run's upload. `prepared` is called when it is made."""
        self._preparing[order.key] = order
        unpacked = self._cache.find(order.tenant, order.upload)
        if unpacked is None:
            self.objects.want(order.key, order.tenant, order.upload)
        else:
            self._copy_later(order, unpacked)

    def expect(self, order: RunOrder) -> None:
        """Note that outputs of a run without an upload, which works in a directory of the user, are
        collected when the run is gone."""
        record = DirectoryRecord(*order.key, order.working_directory, False, order.outputs)
        try:
            self._write(record)
        except OSError as fault:
            log.error("outputs of a run cannot be collected", task=order.task, fault=str(fault))
            self.outputs.give_up(order.key, f"nothing is collected on node {self._config.node}: {fault}")

    def leave(self, key: RunKey) -> None:
        """Note that a run has ended or will not start, and stop preparing its directory."""
        self.objects.leave(key)
        self._preparing.pop(key, None)  # a copy that is being made is removed once it is complete

    def end(self, key: RunKey) -> None:
        """Collect the outputs of a run that is gone, and remove its copy. A repeated call changes nothing."""
        record = self._records.get(key)
        if record is None or key in self._ending:
            return
        self._ending.add(key)
        if record.outputs:
            self._do(f"collecting the outputs of run {key}", partial(self._collect, record))
        else:
            self._do(f"removing the directory of run {key}", partial(self._remove, key))

    def drop(self, key: RunKey) -> None:
        """Remove the directory of a run that never started."""
        if key in self._records and key not in self._copying:
            self._do(f"removing the directory of run {key}", partial(self._remove, key))

    async def adopt(self, here: Collection[RunKey]) -> None:
        """Take over the directories that an earlier agent left. `here` are the runs of this node; the
        directories of other runs are removed after their outputs are collected."""
        try:
            await asyncio.to_thread(self._look)
        except OSError as fault:
            log.error("uploads cannot be used on this node", fault=str(fault))
        for key in self._records.keys() - set(here):
            self.end(key)

    def _look(self) -> None:
        """Read the records, and remove directories without a record. Raises OSError."""
        if not self._root.exists():
            return
        self._open()
        self._cache.clean()
        recorded = set()
        for path in (self._root / "runs").glob("*.json"):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                record = msgspec.json.decode(path.read_bytes(), type=DirectoryRecord)
                self._records[record.key] = record
                recorded.add(path.with_suffix(""))
        for path in (self._root / "runs").glob("*"):
            if path.is_dir() and path not in recorded:
                shutil.rmtree(path, ignore_errors=True)

    def questions(self) -> Iterator[Report]:
        """Yield the questions that are not answered yet, for another leader."""
        yield from self.objects.questions()
        yield from self.outputs.questions()

    def remove_all(self) -> None:
        with contextlib.suppress(OSError):
            shutil.rmtree(self._root)

    def _unpack(self, tenant: str, id: str, data: bytearray) -> Path:
        self._open()
        return self._cache.add(tenant, id, data)

    def _on_unpacked(self, key: RunKey, _id: str, path: Any, failure: Failed | None) -> None:
        order = self._preparing.get(key)
        if order is None:
            return
        if failure is not None:
            del self._preparing[key]
            self._prepared(key, "", failure)
        else:
            self._copy_later(order, path)

    def _copy_later(self, order: RunOrder, source: Path) -> None:
        self._do(f"copying the directory of run {order.key}", partial(self._copy, order, source))

    async def _copy(self, order: RunOrder, source: Path) -> None:
        target, failure = self._directory_of(order.key), None
        self._copying.add(order.key)
        try:
            await asyncio.to_thread(self._copy_now, order, source, target)
        except (OSError, KeyError) as fault:
            is_away = self._cache.find(order.tenant, order.upload) is None
            if is_away and order.key in self._preparing:  # it was dropped as the least used one
                self.objects.want(order.key, order.tenant, order.upload)
                return
            node = self._config.node
            why = (
                f"node {node} cannot make the run's copy of its upload in {target}: {fault}; make room there"
            )
            failure = (FAILED, why)
        finally:
            self._copying.discard(order.key)
        has_left = self._preparing.pop(order.key, None) is None
        if has_left or failure is not None:
            await self._remove(order.key)
        if not has_left:
            self._prepared(order.key, str(target), failure)

    def _copy_now(self, order: RunOrder, source: Path, target: Path) -> None:
        self._open()
        # The record comes first: a later agent finds by it the directory to remove.
        self._write(DirectoryRecord(*order.key, str(target), True, order.outputs))
        shutil.rmtree(target, ignore_errors=True)
        self._cache.copy(source, target, self._owner())

    async def _collect(self, record: DirectoryRecord) -> None:
        """Collect the outputs into an archive, and begin to send it. The copy is removed once the leader has
        stored the archive."""
        await self.outputs.collect(record.key, record.directory, record.outputs)

    def _on_sent(self, key: RunKey) -> None:
        self._do(f"removing the directory of run {key}", partial(self._remove, key))

    async def _remove(self, key: RunKey) -> None:
        record = self._records.get(key)
        if record is None:
            return
        await asyncio.to_thread(self._remove_now, record)
        self._records.pop(key, None)
        self._ending.discard(key)

    def _remove_now(self, record: DirectoryRecord) -> None:
        if record.is_copy and os.path.lexists(record.directory):
            remove_tree(record.directory)
        self._record_file(record.key).unlink(missing_ok=True)

    def _write(self, record: DirectoryRecord) -> None:
        self._open()
        file = self._record_file(record.key)
        draft = file.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode(record))
        draft.replace(file)
        self._records[record.key] = record

    def _open(self) -> None:
        """Make the directories. Runs may pass through the root and `runs` to their own directory but not
        list them; the other directories are closed to them. Raises PermissionError if another user has made
        one of them."""
        if self._is_open and self._root.exists():
            return
        modes = {"": 0o711, "runs": 0o711, "uploads": 0o700, "outputs": 0o700}
        for path, mode in ((self._root / name, mode) for name, mode in modes.items()):
            path.mkdir(mode=mode, parents=True, exist_ok=True)
            status = path.lstat()
            if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
                raise PermissionError(f"{path} belongs to another user; remove it, or set ray.work_dir")
            path.chmod(mode)
        self._is_open = True

    def _directory_of(self, key: RunKey) -> Path:
        return self._root / "runs" / _name_of(key)

    def _record_file(self, key: RunKey) -> Path:
        return self._root / "runs" / f"{_name_of(key)}.json"

    def _owner(self) -> Owner | None:
        """Return the user that runs become. Raises KeyError if there is no such user."""
        if not self._config.task_user:
            return None
        entry = pwd.getpwnam(self._config.task_user)
        return Owner(entry.pw_uid, entry.pw_gid)


def work_directory(config: AgentConfig) -> Path:
    """Return the work directory of one node of one broker. Several nodes and brokers may share a machine."""
    above = Path(config.work_dir or tempfile.gettempdir())
    return above / f"gpubroker-{config.instance}-{config.node}-work"


def _name_of(key: RunKey) -> str:
    task = "".join(letter if letter.isalnum() or letter in "_-" else "_" for letter in key.task)
    return f"{task}-{key.fence}-{key.rank}"
