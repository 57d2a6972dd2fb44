"""Checks whether the local disks to which this process writes have room, so that a full disk is known before
a write fails."""

import asyncio
import errno
import os
from collections.abc import Sequence
from pathlib import Path

import structlog

from gpubroker_server.bootstrap.follower import Job

log = structlog.get_logger("gpubroker")

EVERY_SECONDS = 1.0
ROOM_BYTES = 64 * 1024
"""The bytes that a commit may need."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DiskWatch:
    """Writes a small file at intervals to one directory on each file system. Faults other than a full disk
    are left to the code that uses the disk."""

    def __init__(self, directories: Sequence[Path]) -> None:
        """`directories` must exist."""
        self._directories = list({path.stat().st_dev: path for path in reversed(directories)}.values())
        self._full: dict[Path, str] = {}

    def full(self) -> str:
        """`disk full: /data (No space left on device)`; empty if there is room."""
        found = ", ".join(f"{path} ({fault})" for path, fault in self._full.items())
        return f"disk full: {found}" if found else ""

    def jobs(self) -> list[Job]:
        return [("disks", self._keep())]

    async def _keep(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(EVERY_SECONDS)

    async def look(self) -> None:
        for path in self._directories:
            fault = await asyncio.to_thread(_why_full, path)
            if fault and path not in self._full:
                log.error("disk full; make room, nothing is accepted until then", path=str(path), fault=fault)
            elif not fault and path in self._full:
                log.info("the disk has room again", path=str(path))
            self._full.pop(path, None)
            if fault:
                self._full[path] = fault


def _why_full(directory: Path) -> str:
    """Return the error of a full disk; empty if there is room, or if the write fails for another reason."""
    probe = directory / f".room-{os.getpid()}"
    try:
        with probe.open("wb") as file:
            file.write(bytes(ROOM_BYTES))
    except OSError as error:
        return os.strerror(error.errno) if error.errno in _FULL else ""
    finally:
        probe.unlink(missing_ok=True)
    return ""
