"""The process around a local Ray head: starts it, ends with it, and leaves nothing behind.

Started as `python -m service.adapters.ray.head_supervisor '{"data_dir": ...}' DESCRIPTOR`, it goes into the
background at once, in a session of its own, and writes a byte to the descriptor when Ray is up. All that Ray
starts stays below this process, because it adopts orphans.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpubroker.runtime.process import adopt_orphans

from service.adapters.ray.head import HeadState, read_state, state_file, versions, write_state
from service.adapters.ray.processes import (
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

HOOK = "service.adapters.ray.head_supervisor.without_client_server"


@dataclass(frozen=True, slots=True)
class Orders:
    data_dir: str
    temp_dir: str
    object_store_bytes: int
    idle_stop_seconds: float


def main() -> int:
    if os.fork():
        return 0  # who started us has no child to bury
    os.setsid()
    return _supervise(Orders(**json.loads(sys.argv[1])), ready=int(sys.argv[2]))


def _supervise(orders: Orders, ready: int) -> int:
    something_happened, asked_to_stop = threading.Event(), threading.Event()

    def note(number: int, _frame: Any) -> None:
        if number != signal.SIGCHLD:
            asked_to_stop.set()
        something_happened.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, note)
    adopt_orphans()
    try:
        _start_ray(orders)
        vital = _vital_pids()
        state = _publish(orders)
        os.write(ready, b"1")
        os.close(ready)
        while not asked_to_stop.is_set() and not (_reap() & vital) and not _is_idle(state, orders):
            something_happened.wait(WATCH_SECONDS)
            something_happened.clear()
    finally:
        _clear_away(orders)
    return 0


def without_client_server(ray_params: Any, _head: bool) -> None:
    """Ray's start hook. Where grpc is installed Ray would open a client server on port 10001, unasked."""
    ray_params.ray_client_server_port = None


def _start_ray(orders: Orders) -> None:
    """Back when Ray is up. Raises CalledProcessError; what Ray said is in our output."""
    subprocess.run(  # noqa: S603  # Ray's own command line
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--disable-usage-stats"),
            *("--node-ip-address=127.0.0.1", "--port=0", "--min-worker-port=0", "--max-worker-port=0"),
            *("--include-dashboard=false", "--include-log-monitor=false", "--no-monitor"),
            *(f"--num-cpus={os.cpu_count() or 1}", "--num-gpus=0", f"--temp-dir={orders.temp_dir}"),
            f"--object-store-memory={orders.object_store_bytes}",
        ],
        env={**os.environ, "RAY_START_HOOK": HOOK},
        check=True,
    )


def _vital_pids() -> set[int]:
    below = descendants(os.getpid(), process_table())
    return {process.pid for process in below if name_of(process.pid) in VITAL}


def _publish(orders: Orders) -> HeadState:
    mine = process_id(os.getpid())
    ray, python = versions()
    state = HeadState(
        pid=mine.pid,
        start_ticks=mine.start_ticks,
        boot_id=boot_id(),
        address=(Path(orders.temp_dir) / "ray_current_cluster").read_text().strip(),
        temp_dir=orders.temp_dir,
        ray=ray,
        python=python,
    )
    state.keepalive.touch()
    write_state(Path(orders.data_dir), state)
    return state


def _reap() -> set[int]:
    """Pids of children that have ended, adopted ones too. Raises ChildProcessError if there is no child."""
    ended = set()
    while pid := os.waitpid(-1, os.WNOHANG)[0]:
        ended.add(pid)
    return ended


def _is_idle(state: HeadState, orders: Orders) -> bool:
    """No agent has been of use to a broker or to a run for long."""
    return time.time() - state.keepalive.stat().st_mtime > orders.idle_stop_seconds


def _clear_away(orders: Orders) -> None:
    """Back when not even a zombie is left: they would be somebody else's to bury."""
    with contextlib.suppress(ChildProcessError):
        while True:
            kill_all(descendants(os.getpid(), process_table()))
            _reap()
            time.sleep(0.01)
    shutil.rmtree(orders.temp_dir, ignore_errors=True)
    published = read_state(Path(orders.data_dir))
    if published is not None and published.pid == os.getpid():
        state_file(Path(orders.data_dir)).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
