"""What happened on the machine: the runs that there were, and how long each was certainly there."""

import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from msgspec import Struct

from tests.chaos.jobs import append_line

POLL_SECONDS = 0.05


class Span(Struct, frozen=True):
    """One run, which was there at least from `began_at` to `seen_until`."""

    task: str
    fence: int
    devices: tuple[str, ...]
    mb: int
    began_at: float
    seen_until: float


class Observer:
    """Polls the processes of all runs that have started, and records when each was seen."""

    def __init__(self, witness: Path, seen: Path) -> None:
        self._witness, self._seen = witness, seen
        self._read = 0
        self._alive: dict[tuple[str, int], psutil.Process] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll_all, name="observer", daemon=True)

    def __enter__(self) -> "Observer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def pids(self) -> list[int]:
        """The processes of the runs that are there now."""
        return sorted({process.pid for process in list(self._alive.values())})

    def _poll_all(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self._poll()
        self._poll()

    def _poll(self) -> None:
        for line in self._new_lines():
            run = (line["task"], line["fence"])
            if line["what"] == "start" and line["devices"]:
                with suppress(psutil.NoSuchProcess):
                    self._alive[run] = psutil.Process(line["pid"])
        for run, process in list(self._alive.items()):
            at = time.time()
            if is_running(process):
                append_line(str(self._seen), task=run[0], fence=run[1], at=at)
            else:
                del self._alive[run]

    def _new_lines(self) -> Iterable[Mapping[str, Any]]:
        if not self._witness.exists():
            return
        with self._witness.open(encoding="utf-8") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith("\n"):
                    break
                self._read += len(line.encode())
                yield json.loads(line)


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def spans(witness: Path, seen: Path) -> list[Span]:
    """Every run that has started."""
    until: dict[tuple[str, int], float] = defaultdict(float)
    started: list[dict[str, Any]] = []
    for line in (*lines_of(witness), *lines_of(seen)):
        run = (line["task"], line["fence"])
        until[run] = max(until[run], line["at"])
        if line.get("what") == "start":
            started.append(line)
    return [
        Span(
            line["task"],
            line["fence"],
            tuple(line["devices"]),
            line["mb"],
            line["at"],
            until[line["task"], line["fence"]],
        )
        for line in started
    ]


def started_twice(runs: Sequence[Span]) -> list[tuple[str, int]]:
    """Claims under which more than one run started."""
    counted = Counter((run.task, run.fence) for run in runs)
    return sorted(claim for claim, count in counted.items() if count > 1)


def beyond_capacity(runs: Iterable[Span], capacity_mb: int) -> int:
    """The most MiB by which concurrent runs exceeded a device; 0 if they never did."""
    changes_of: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for run in runs:
        for device in run.devices:
            changes_of[device] += [(run.began_at, run.mb), (run.seen_until, -run.mb)]
    worst = 0
    for changes in changes_of.values():
        used = 0
        for _, mb in sorted(changes):  # ends before starts at the same time
            used += mb
            worst = max(worst, used - capacity_mb)
    return worst
