"""The process around a local Ray head: starts it, ends with it, and leaves nothing behind.

Started as `python -m gpubroker_server.adapters.ray.head.supervisor '{"data_dir": ...}' DESCRIPTOR`, it goes
into the background at once, in a session of its own, and writes a byte to the descriptor when Ray
is up. All that Ray starts stays below this process, because it adopts orphans.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpubroker.runtime.process import adopt_orphans

from gpubroker_server.adapters.ray.head import ray_worker
from gpubroker_server.adapters.ray.head.head import HeadState, read_state, state_file, versions, write_state
from gpubroker_server.adapters.ray.processes import (
    boot_id,
    descendants,
    kill_all,
    name_of,
    process_id,
    process_table,
)

WATCH_SECONDS = 1.0
VITAL = frozenset({"gcs_server", "raylet"})
"""Without one of these there is no cluster left to talk to."""

START = "gpubroker_server.adapters.ray.head.start"


@dataclass(frozen=True, slots=True)
class Orders:
    data_dir: str
    object_store_bytes: int
    idle_stop_seconds: float


class Bell:
    """Rings when a child has ended, and when this process is told to stop.

    A pipe and no `threading.Event`: a handler that interrupts the event's own code waits for itself.
    """

    def __init__(self) -> None:
        self._reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self.stop = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, self._note)

    def wait(self) -> None:
        """Back when it has rung since the last time, or after a second."""
        if select.select([self._reading], [], [], WATCH_SECONDS)[0]:
            os.read(self._reading, 4096)

    def _note(self, number: int, _frame: Any) -> None:
        self.stop |= number != signal.SIGCHLD


def main() -> int:
    if os.fork():
        return 0  # who started us has no child to bury
    os.setsid()
    return _supervise(Orders(**json.loads(sys.argv[1])), ready=int(sys.argv[2]))


def _supervise(orders: Orders, ready: int) -> int:
    bell = Bell()
    adopt_orphans()
    try:
        state = _begin(orders)
    except OSError as fault:
        print(f"no place for a Ray head: {fault}", file=sys.stderr)
        return 1
    try:
        if not _start_ray(orders, state, bell):
            return 1
        vital = _vital_pids()
        _publish(orders, state)
        os.write(ready, b"1")
        os.close(ready)
        while not (bell.stop or _reap() & vital or _is_idle(state, orders)):
            bell.wait()
    finally:
        _clear_away(orders, state)
    return 0


def _begin(orders: Orders) -> HeadState:
    """Who this is, for a service that must clear it away before Ray is up. Raises OSError."""
    mine = process_id(os.getpid())
    ray, python = versions()
    state = HeadState(
        pid=mine.pid,
        start_ticks=mine.start_ticks,
        boot_id=boot_id(),
        address="",
        temp_dir=tempfile.mkdtemp(prefix="gpb-", dir="/tmp"),  # socket paths must stay short
        ray=ray,
        python=python,
    )
    try:
        shutil.copyfile(ray_worker.__file__, state.worker_file)
        write_state(Path(orders.data_dir), state)
    except OSError:
        shutil.rmtree(state.temp_dir)
        raise
    return state


def _start_ray(orders: Orders, state: HeadState, bell: Bell) -> bool:
    """Whether Ray is up, once that is known. What Ray says is in our output."""
    starting = subprocess.Popen(  # noqa: S603  # Ray's own command line, as it is there
        [
            *(sys.executable, "-m", START, "start", "--head", "--disable-usage-stats"),
            *("--node-ip-address=127.0.0.1", "--port=0", "--min-worker-port=0", "--max-worker-port=0"),
            *("--include-dashboard=false", "--include-log-monitor=false", "--no-monitor"),
            *(f"--num-cpus={os.cpu_count() or 1}", "--num-gpus=0", f"--temp-dir={state.ray_dir}"),
            f"--object-store-memory={orders.object_store_bytes}",
        ],
        env={**os.environ, "RAY_START_HOOK": f"{START}.prepare"},
    )
    while starting.poll() is None and not bell.stop:
        bell.wait()
    return starting.returncode == 0


def _vital_pids() -> set[int]:
    below = descendants(os.getpid(), process_table())
    return {process.pid for process in below if name_of(process.pid) in VITAL}


def _publish(orders: Orders, state: HeadState) -> None:
    """Tell where Ray is, now that it is up."""
    address = (state.ray_dir / "ray_current_cluster").read_text().strip()
    state.keepalive.touch()
    write_state(Path(orders.data_dir), replace(state, address=address))


def _reap() -> set[int]:
    """Pids of children that have ended, adopted ones too. Raises ChildProcessError if there is no child."""
    ended = set()
    while pid := os.waitpid(-1, os.WNOHANG)[0]:
        ended.add(pid)
    return ended


def _is_idle(state: HeadState, orders: Orders) -> bool:
    """No agent has been of use to a broker or to a run for long."""
    try:
        useful_at = state.keepalive.stat().st_mtime
    except OSError:
        # Somebody swept the file away, which says nothing of the runs.
        with contextlib.suppress(OSError):
            state.keepalive.touch()
        return False
    return time.time() - useful_at > orders.idle_stop_seconds


def _clear_away(orders: Orders, state: HeadState) -> None:
    """Back when not even a zombie is left: they would be somebody else's to bury."""
    with contextlib.suppress(ChildProcessError):
        while True:
            kill_all(descendants(os.getpid(), process_table()))
            _reap()
            time.sleep(0.01)
    shutil.rmtree(state.temp_dir, ignore_errors=True)
    published = read_state(Path(orders.data_dir))
    if published is not None and published.pid == os.getpid():
        state_file(Path(orders.data_dir)).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
