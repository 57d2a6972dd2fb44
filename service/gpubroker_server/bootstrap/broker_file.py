"""The files in the data directory by which the processes that use it are found on their machine.

A broker without HTTP locks its file for as long as it lives, and renews its time for as long as its event
loop runs. A process that serves HTTP locks its file until it has ended, which is after its port was closed.
"""

import asyncio
import fcntl
import os
import time
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from gpubroker_server.core.domain.units import Seconds

BEAT_SECONDS = 2.0
LATE_SECONDS = 30.0
"""The time without a renewal of its file after which a broker counts as hanging."""


class BrokerFile:
    """The lock file of this process. It exists within the `with` block."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / f"broker-{os.getpid()}.lock"
        self._file: IO[str] | None = None

    def __enter__(self) -> "BrokerFile":
        self._file = self._path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        os.utime(self._path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._path.unlink(missing_ok=True)
        if self._file is not None:
            self._file.close()

    async def renewed_during(self, work: Coroutine[Any, Any, int]) -> int:
        """Do the work, renew the file meanwhile, and return the result of the work."""
        keeping = asyncio.create_task(self._keep())
        try:
            return await work
        finally:
            keeping.cancel()

    async def _keep(self) -> None:
        while True:
            with suppress(OSError):  # the age of the file shows it
                await asyncio.to_thread(os.utime, self._path)
            await asyncio.sleep(BEAT_SECONDS)


_held: list[IO[str]] = []
"""The files that stay open, and so locked, until this process has ended."""


def hold_service_file(data_dir: Path, url: str) -> None:
    """Write and lock a file that names the address that this process serves. The file stays after the
    process has ended, but is no longer locked."""
    for path in data_dir.glob("service-*.lock"):
        _is_locked(path, remove=True)
    file = (data_dir / f"service-{os.getpid()}.lock").open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    file.write(url)
    file.flush()
    _held.append(file)


def service_at(data_dir: Path, url: str) -> int | None:
    """Return the id of the process that serves or served this address and has not ended yet; None if there
    is none, or if it is of a release without such files."""
    for path in data_dir.glob("service-*.lock"):
        with suppress(FileNotFoundError):
            if path.read_text() == url and _is_locked(path, remove=True):
                return int(path.stem.removeprefix("service-"))
    return None


def brokers_of(data_dir: Path) -> list[int]:
    """Return the process ids of the brokers with this data directory. The files of killed brokers are
    removed."""
    return [_process(path) for path in data_dir.glob("broker-*.lock") if _is_locked(path, remove=True)]


def ages_of_brokers(data_dir: Path) -> Iterator[tuple[int, Seconds]]:
    """Yield the process id of each broker with this data directory, and the seconds since it renewed its
    file."""
    for path in data_dir.glob("broker-*.lock"):
        with suppress(FileNotFoundError):
            if _is_locked(path, remove=False):
                yield _process(path), Seconds(time.time() - path.stat().st_mtime)


def _process(path: Path) -> int:
    return int(path.stem.removeprefix("broker-"))


def _is_locked(path: Path, *, remove: bool) -> bool:
    try:
        with path.open("r+" if remove else "r") as file:
            fcntl.flock(file, (fcntl.LOCK_EX if remove else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            if remove:
                path.unlink()
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
