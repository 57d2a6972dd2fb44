"""The files of a node's runs: their logs, and the records by which a later agent takes runs over."""

import contextlib
import ctypes
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

import msgspec
import structlog
from gpubroker.runtime.messages import Report, RunKey, RunOrder
from gpubroker.runtime.output import STREAMS, LogStream
from msgspec import Struct

from gpubroker_server.adapters.ray.processes import ProcessId

log_lines = structlog.get_logger("gpubroker.agent")

LOG_BYTES = 16 * 2**20
"""The middle of a log that takes more disk space than this is removed."""
KEPT_END_BYTES = 6 * 2**20
"""The bytes that are left at the beginning and at the end of a log when its middle is removed. They are more
than `limits.log_bytes` keeps of each."""
ANSWER_BYTES = 256 * 1024
"""The most bytes of one stream in one answer. The leader asks for the next ones."""
_BLOCK_BYTES = 4096
_PUNCH_HOLE = 0x01 | 0x02
"""FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE."""
KEPT_LOGS = 2000
KEPT_LOG_BYTES = 2**30
"""The most bytes of logs of ended runs that are kept. The oldest logs are removed first; KEPT_LOGS limits
their number."""

_STEM = re.compile(r"(.+)-(\d+)-(\d+)")
_is_plain = re.compile("[A-Za-z0-9_.~-]+").fullmatch
"""True for an id that is not quoted in the name of a file."""
_SUFFIXES: Mapping[LogStream, str] = {"stdout": ".log", "stderr": ".err", "setup": ".setup"}
KEPT_SETUP_BYTES = 128 * 1024


class UnreadableRecord(Exception):
    """A record cannot be read, so a run may live of which nothing else is known. An agent that went on would
    report that run gone."""


class RunRecord(Struct, frozen=True):
    """The record of a run. It is written before the run's process gets its order, and removed when no process
    of it is left.

    An agent of another release may read it, so a field that is added has a default.
    """

    task: str
    fence: int
    rank: int
    leases: tuple[tuple[str, int], ...]
    """(device UUID, MiB)"""
    runner: str
    """The name of the run's Ray actor; empty for an external process."""
    pid: int
    start_ticks: int
    ray_node: str
    """Ray's id of the node. If the node has another id now, the Ray to which the run belonged is gone."""
    protocol: int
    """The protocol that its runner and the agent speak; 0 for an external process."""
    memory_mb: int = 0
    """The host memory that the run asked for."""

    @classmethod
    def of(
        cls, order: RunOrder, runner: str, process: ProcessId, ray_node: str, protocol: int
    ) -> "RunRecord":
        return cls(*order.key, order.leases, runner, *process, ray_node, protocol, order.memory_mb)

    @property
    def key(self) -> RunKey:
        return RunKey(self.task, self.fence, self.rank)

    @property
    def process(self) -> ProcessId:
        return ProcessId(self.pid, self.start_ticks)


class RunFiles:
    """The records and logs of one node's runs, in one directory of mode 0700.

    The name of a record ends with the machine's boot id. Records of earlier boots may be damaged by a power
    cut; they name no process any more and are not read. The kernel keeps everything written since the boot.
    """

    def __init__(self, directory: Path, boot_id: str) -> None:
        """Make the directory. Raises PermissionError if other users could put files there."""
        _make_private(directory)
        # Resolved, because leftover processes are found by the path of the log that they have open.
        self._directory = directory.resolve()
        self._prefix = f"{self._directory}/"
        names = (_STEM.fullmatch(path.stem) for path in self._directory.glob("*.setup"))
        self.with_setup_log = {
            RunKey(unquote(name[1]), int(name[2]), int(name[3])) for name in names if name is not None
        }
        """The runs with a log of the preparation of their environment."""
        self._ending = f"@{boot_id}.json"
        self._adds = True
        """False if the newest lines could not be written."""

    def log_of(self, key: RunKey, stream: LogStream = "stdout") -> Path:
        """Return the path of a log. An earlier release wrote both streams into the file of `stdout`."""
        return Path(self.path_of_log(key, stream))

    def path_of_log(self, key: RunKey, stream: LogStream) -> str:
        """Return the path of a log as text. Each run that ends needs two paths, and joining these with
        `Path` took a tenth of the agent's time per run."""
        return f"{self._prefix}{_stem(key)}{_SUFFIXES[stream]}"

    def add_to_log(self, key: RunKey, *printed: bytes) -> None:
        """Append the output of a run in a shared process to its logs, one value per stream. Output that
        cannot be written, as on a full disk, is dropped, and the run goes on."""
        try:
            for stream, data in zip(STREAMS, printed, strict=True):
                if data:
                    path = self.path_of_log(key, stream)
                    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                    with os.fdopen(descriptor, "wb") as file:
                        file.write(data)
        except OSError as fault:
            if self._adds:
                message = "the logs of runs in shared processes cannot be written; what they print is dropped"
                log_lines.error(message, path=str(self._directory), fault=str(fault))
            self._adds = False
        else:
            self._adds = True

    def key_of_log(self, path: str) -> RunKey | None:
        """Return the run that writes this log; None if the path is no log of this node. The file may be
        deleted."""
        log = Path(path.removesuffix(" (deleted)"))
        if log.parent != self._directory or log.suffix not in (".log", ".err"):
            return None
        named = _STEM.fullmatch(log.stem)
        return None if named is None else RunKey(unquote(named[1]), int(named[2]), int(named[3]))

    def add_setup_log(self, key: RunKey, log: Path) -> None:
        """Keep the end of what the preparation of a run's environment printed beside the run's logs."""
        with contextlib.suppress(OSError), log.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = os.pread(file.fileno(), KEPT_SETUP_BYTES, max(0, size - KEPT_SETUP_BYTES))
            descriptor = os.open(
                self.path_of_log(key, "setup"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600
            )
            with os.fdopen(descriptor, "wb") as copy:
                copy.write(data)
            self.with_setup_log.add(key)

    def write_record(self, record: RunRecord) -> None:
        """Write a record. If that fails, raises OSError and leaves no record."""
        draft = self._directory / f"{_stem(record.key)}.new"
        try:
            draft.write_text(msgspec.json.encode(record).decode())
            draft.replace(self._record_of(_stem(record.key)))
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise

    def remove_record(self, key: RunKey) -> None:
        self._record_of(_stem(key)).unlink(missing_ok=True)
        self.with_setup_log.discard(key)

    def records(self) -> list[RunRecord]:
        """Return the records of this boot. Raises UnreadableRecord."""
        return [self._read(path) for path in sorted(self._directory.glob(f"*{self._ending}"))]

    def remove_outdated(self) -> None:
        """Remove the records of earlier boots, and unfinished records."""
        for path in [*self._directory.glob("*.json"), *self._directory.glob("*.new")]:
            if not path.name.endswith(self._ending):
                path.unlink(missing_ok=True)

    def limit_logs(self) -> None:
        """Remove the middles of large logs, and the oldest logs of ended runs. The log of a run that has a
        record is never removed."""
        logs = sorted(self._logs(), key=lambda log: log[1].st_mtime, reverse=True)
        kept_bytes = kept = 0
        for path, status in logs:
            disk_bytes = status.st_blocks * 512
            if disk_bytes > LOG_BYTES:
                _cut(path)
            elif not self._record_of(path.stem).exists():
                kept_bytes, kept = kept_bytes + min(disk_bytes, status.st_size), kept + 1
                if kept > KEPT_LOGS or kept_bytes > KEPT_LOG_BYTES:
                    path.unlink(missing_ok=True)

    def remove_all(self) -> None:
        """Remove the directory, and the one above it if no other node has files there."""
        with contextlib.suppress(OSError):
            shutil.rmtree(self._directory)
            self._directory.parent.rmdir()

    def _read(self, path: Path) -> RunRecord:
        try:
            record = msgspec.json.decode(_read_own(path), type=RunRecord)
            if self._record_of(_stem(record.key)) != path:
                raise ValueError(f"it is the record of {record.key}")
        except (OSError, ValueError) as fault:
            raise UnreadableRecord(
                f"the record {path} cannot be read: {fault}; it names a run that may still live, so this "
                "node cannot be used. End that run's processes if there are any, then remove the file"
            ) from fault
        return record

    def _logs(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in [
            *self._directory.glob("*.log"),
            *self._directory.glob("*.err"),
            *self._directory.glob("*.setup"),
        ]:
            with contextlib.suppress(FileNotFoundError):
                yield path, path.stat()

    def _record_of(self, stem: str) -> Path:
        return self._directory / f"{stem}{self._ending}"


def _stem(key: RunKey) -> str:
    task = key.task if _is_plain(key.task) else quote(key.task, safe="")
    return f"{task}-{key.fence}-{key.rank}"


def _cut(log: Path) -> None:
    """Remove the middle of a log and leave a hole, so that the rest keeps its place while the run appends."""
    begin = -(-KEPT_END_BYTES // _BLOCK_BYTES) * _BLOCK_BYTES
    with log.open("r+b") as file:
        end = (os.fstat(file.fileno()).st_size - KEPT_END_BYTES) // _BLOCK_BYTES * _BLOCK_BYTES
        span = (ctypes.c_long(begin), ctypes.c_long(end - begin))
        if end > begin and ctypes.CDLL(None, use_errno=True).fallocate(file.fileno(), _PUNCH_HOLE, *span):
            fault = os.strerror(ctypes.get_errno())
            log_lines.warning("a log of a run cannot be made smaller", path=str(log), fault=fault)


def _read_own(path: Path) -> bytes:
    """Return the bytes of a file. Raises PermissionError if another user made it, because a record decides
    which processes are killed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError("another user made it")
        return file.read()


def _make_private(directory: Path) -> None:
    """Make the directory and its missing parents for this user only.

    Raises PermissionError if, below a directory that every user may write to, a part of the path is owned or
    writable by another user than root and this one: that user could have made the part first, or could
    replace it.
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
    """Return True if no other user can replace this user's files in the directory. The sticky bit is
    enough."""
    kept = bool(status.st_mode & stat.S_ISVTX) or not _others_write(status)
    return status.st_uid in (0, os.geteuid()) and stat.S_ISDIR(status.st_mode) and kept


def _others_write(status: os.stat_result) -> bool:
    return bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


class Piece(NamedTuple):
    first_byte: int
    data: bytes


class RunLogs:
    """Makes reports of the output of a node's runs: the new part of a log while the run goes on, and the
    kept parts of the log once the run has ended."""

    def __init__(self, files: RunFiles, limit_bytes: int) -> None:
        """`limit_bytes` is the most bytes that are reported of one stream of a run. Of a longer stream, the
        first and the last bytes are reported, half of the limit each."""
        self._files = files
        self._half_bytes = limit_bytes // 2

    def new(self, key: RunKey, stream: LogStream, first_byte: int) -> Report:
        """Return a report of a stream from this byte on. It may be empty."""
        piece = self._read(key, stream, first_byte, ANSWER_BYTES) or Piece(first_byte, b"")
        return logged(key, stream, piece, is_final=False)

    def kept(self, key: RunKey) -> Iterator[Report]:
        """Yield the reports of the log of an ended run: the beginning and the end of each stream."""
        for stream in _SUFFIXES if key in self._files.with_setup_log else STREAMS:
            first = self._read(key, stream, 0, self._half_bytes)
            if first is None:
                continue
            yield logged(key, stream, first, is_final=True)
            last = self._read(key, stream, first.first_byte + len(first.data), self._half_bytes)
            if last is not None:
                yield logged(key, stream, last, is_final=True)

    def _read(self, key: RunKey, stream: LogStream, first_byte: int, most_bytes: int) -> Piece | None:
        """Return the next bytes of a stream that are reported; None if there are none."""
        try:
            log = os.open(self._files.path_of_log(key, stream), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None  # most runs in shared processes print nothing
        with contextlib.suppress(OSError), os.fdopen(log, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if first_byte >= self._half_bytes:
                first_byte = max(first_byte, size - self._half_bytes)
            else:
                most_bytes = min(most_bytes, self._half_bytes - first_byte)
            # The middle of a long log may have been removed.
            begin = os.lseek(file.fileno(), first_byte, os.SEEK_DATA)
            data = os.pread(file.fileno(), most_bytes, begin)
            return Piece(begin, data) if data else None
        return None


def logged(key: RunKey, stream: LogStream, piece: Piece, *, is_final: bool) -> Report:
    return ("logged", *key, time.time(), stream, piece.first_byte, piece.data, is_final)
