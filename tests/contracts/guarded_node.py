"""The disk guard of one node, asked as its agent is, and files of any age for it."""

import os
import time
from pathlib import Path
from typing import Any

from gpubroker_server.adapters.ray.agent.disk_cleaning import Answer, DiskCleaner, DiskTask
from gpubroker_server.core.domain.device import FileClass, FoundFile, WatchedRoot
from gpubroker_server.core.domain.units import Seconds
from msgspec.structs import replace

DAY = 86_400.0
WEEK = 7 * DAY


def put(path: Path, data: bytes = b"x" * 100, *, days: float = 8.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    at = time.time() - days * DAY
    os.utime(path, (at, at))
    return path


class Node:
    def __init__(self, folder: Path, *roots: WatchedRoot, live: tuple[Path, ...] = ()) -> None:
        self.folder = folder
        self.roots = roots
        self.live = live
        self.spared: tuple[Path, ...] = ()
        self.guard = DiskCleaner(folder, lambda _: None)

    def ask(self, deletes: tuple[FoundFile, ...] | None = None, **changes: Any) -> Answer:
        paths = tuple(map(str, self.live))
        spared = tuple(map(str, self.spared))
        task = DiskTask(
            "r", self.roots, spared, 0.0, Seconds(WEEK), deletes, runs_sync=True, live=paths, above=0.0
        )
        return self.guard.answer(replace(task, **changes))

    def look(self) -> list[str]:
        return sorted(file.path for file in self.ask().files)

    def clean(self) -> Answer:
        self.ask()
        return self.ask(tuple(self.ask().files))


def left(top: Path) -> list[str]:
    return sorted(
        str(path.relative_to(top)) for path in top.rglob("*") if path.is_file() or path.is_symlink()
    )


def root(top: Path, file_class: FileClass = FileClass.LOG, *sync: str) -> WatchedRoot:
    return WatchedRoot(str(top), file_class, sync)
