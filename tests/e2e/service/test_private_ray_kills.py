"""Random kills while commands are Ray clusters: nothing is left, and no memory is released early."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from gpubroker import Broker, Refused, Task
from gpubroker.errors import Unreachable, WaitTimeout
from gpubroker_server.adapters.ray.processes import name_of, process_table

from tests.e2e.service.test_private_ray import RAY_SECONDS, STAYS, directories, processes_of, submit
from tests.e2e.service_process import ServiceProcess, until

PARTS = "driver", "gcs_server", "raylet", "worker", "start", "run", "agent", "leader"


class Witness(threading.Thread):
    """Looks for processes of a task whose leases are gone."""

    def __init__(self, broker: Broker, task: Task) -> None:
        super().__init__(daemon=True)
        self._broker = broker
        self._task = task
        self._done = threading.Event()
        self.early: list[int] = []
        """Processes that were there after their memory was free."""

    def run(self) -> None:
        has_leased = False
        while not self._done.wait(0.05):
            with suppress(Unreachable, Refused):
                leased = any(gpu.leased_mb for gpu in self._broker.gpus())
                has_leased |= leased
                if has_leased and not leased:  # the leases are looked at first
                    self.early += processes_of(self._task)

    def stop(self) -> None:
        self._done.set()
        self.join()


@contextmanager
def witnessed(broker: Broker, task: Task) -> Iterator[Witness]:
    witness = Witness(broker, task)
    witness.start()
    try:
        yield witness
    finally:
        witness.stop()


def find(service: ServiceProcess, task: Task, part: str) -> int | None:
    """Return the pid of a part; None if it is not there now."""
    if part == "leader":
        return service.pid
    if part == "agent":
        above = {pid for pid, entry in process_table().items() if name_of(pid).startswith("ray::NodeAgent")}
        own = [pid for pid in above if str(service.data_dir).encode() in environment(pid)]
        return own[0] if own else None
    marked = {pid: command(pid) for pid in processes_of(task)}
    drivers = [pid for pid, words in marked.items() if STAYS.encode() in words]
    if part in ("driver", "run"):
        return None if not drivers else drivers[0] if part == "driver" else process_table()[drivers[0]].parent
    named = {
        "worker": lambda pid: name_of(pid).startswith("ray::"),
        "start": lambda pid: b"start\0--block" in marked[pid],
    }
    is_part = named.get(part, lambda pid: name_of(pid) == part)
    return next(filter(is_part, marked), None)


def environment(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def kill_one(service: ServiceProcess, folder: Path, luck: random.Random, part: str) -> None:
    """Run a command as a Ray cluster, kill one part of it at some moment, and see that all of it goes."""
    notes = folder / "witness"
    notes.write_text("")
    before = set(directories())
    task = submit(service.broker, STAYS, notes, "stay", cpu=1, gpu_mb=1024)
    with witnessed(service.broker, task) as witness:
        if luck.random() < 0.5 or part in ("worker", "driver", "run"):
            until(notes.read_text, "the driver works", RAY_SECONDS)
        until(lambda: find(service, task, part), f"{part} is there", RAY_SECONDS)
        time.sleep(luck.random())
        pid = find(service, task, part)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if part == "leader":
            service.ended()
            service.start()
        # A run may outlive agent and leader, and a node that ends while it starts is started again.
        with suppress(WaitTimeout):
            service.broker.wait(task, timeout_seconds=3)
        with suppress(Refused):
            service.broker.cancel(task, grace_seconds=1)
        service.broker.wait(task, timeout_seconds=RAY_SECONDS)
        until(lambda: all(gpu.leased_mb == 0 for gpu in service.broker.gpus()), "its memory is free")
        assert {pid: command(pid) for pid in processes_of(task)} == {}
    assert witness.early == []
    until(lambda: set(directories()) <= before, "its directories are removed")


@pytest.mark.parametrize("part", ["raylet", "run", "agent"])
def test_kill_of_a_part_leaves_nothing(service: ServiceProcess, tmp_path: Path, part: str) -> None:
    kill_one(service, tmp_path, random.Random(part), part)


@pytest.mark.evidence
def test_200_random_kills_leave_nothing_and_release_no_memory_early(
    service: ServiceProcess, tmp_path: Path
) -> None:
    luck = random.Random(31)
    for number in range(int(os.environ.get("GPUBROKER_KILLS", "200"))):
        part = PARTS[number] if number < len(PARTS) else luck.choice(PARTS)
        print(f"{number}: {part}", flush=True)
        kill_one(service, tmp_path, luck, part)
