"""The process around a local Ray head. It starts the head, ends with it, and leaves no process or file
behind.

The program is started as `python -m gpubroker_server.adapters.ray.head.supervisor '{"data_dir": ...}'
DESCRIPTOR`. It goes into the background at once, in a session of its own. It writes READY to the descriptor
when Ray is up, or else the reason why it is not. All processes that Ray starts stay descendants of this one,
because it adopts orphans.
"""

import contextlib
import json
import math
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, NoReturn

from gpubroker.runtime.process import adopt_orphans
from msgspec import Struct
from msgspec.structs import replace

from gpubroker_server.adapters.ray.head.head import (
    HEAD_LOST,
    LEAVE_SECONDS,
    READY,
    HeadState,
    read_state,
    state_file,
    versions,
    write_state,
)
from gpubroker_server.adapters.ray.head.node_to_start import NodeToStart
from gpubroker_server.adapters.ray.processes import (
    ProcessId,
    boot_id,
    descendants,
    is_alive,
    kill_all,
    name_of,
    process_id,
    process_table,
)

WATCH_SECONDS = 1.0
START_WATCH_SECONDS = 0.1
LOST_IDLE_SECONDS = 5.0
"""The time since the agent last reported runs after which a head that has lost a vital process ends."""
WATCHED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
MAX_LINES, MAX_LINE = 12, 300
_FAULT = re.compile(r"\) [\w.]+:\d+: {1,2}(?=.*(?:Check failed|Timed out|Failed|failed))")
"""The prefix of an error's text in the logs of Ray's C++ processes."""
_FRAME = re.compile(r"^/\S+\(.*\) \[0x|^\*{3} ")
AGENT = "ray::NodeAgent"
"""The beginning of the name of an agent's process."""


class HeadLost(Exception):
    """A vital process ended. The message says which one, when, and what is done."""


class HeadOrders(Struct, frozen=True):
    data_dir: str
    object_store_bytes: int
    idle_stop_seconds: float
    dashboard: bool = False
    chooses_ports: bool = False


class SignalPipe:
    """Wakes this process when a child has ended, and when it is told to stop.

    This is a pipe and not a `threading.Event`: a signal handler that interrupts the event's own code would
    wait for itself.
    """

    def __init__(self) -> None:
        self._reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self.stop = False
        for number in WATCHED_SIGNALS:
            signal.signal(number, self._note)

    def wait(self, most_seconds: float = WATCH_SECONDS, *also: int) -> list[int]:
        """Wait for a signal, or until one of the descriptors `also` can be read, but no longer than
        `most_seconds`. Returns the descriptors that can be read."""
        ready = select.select([self._reading, *also], [], [], most_seconds)[0]
        if self._reading in ready:
            ready.remove(self._reading)
            os.read(self._reading, 4096)
        return ready

    def close_in_child(self) -> None:
        """Give a forked child the default handlers."""
        signal.set_wakeup_fd(-1)
        for number in WATCHED_SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    def _note(self, number: int, _frame: Any) -> None:
        self.stop |= number != signal.SIGCHLD


def main() -> int:
    if os.fork():
        return 0  # the service has no child to reap
    os.setsid()
    return _supervise(HeadOrders(**json.loads(sys.argv[1])), ready=int(sys.argv[2]))


def _supervise(orders: HeadOrders, ready: int) -> int:
    signals = SignalPipe()
    adopt_orphans()
    try:
        state = begin(Path(orders.data_dir))
    except OSError as fault:
        print(f"cannot make a directory for the Ray head: {fault}", file=sys.stderr)
        return 1
    try:
        node = NodeToStart(
            orders.object_store_bytes,
            state.ray_dir,
            dashboard=orders.dashboard,
            chooses_ports=orders.chooses_ports,
        )
        vital = start_ray(node, state, signals)
        if not vital:
            return 1
        state.keepalive.touch()
        address, dashboard = state.address_file.read_text().splitlines()
        write_state(Path(orders.data_dir), replace(state, address=address, dashboard=dashboard))
        os.write(ready, READY)
        os.close(ready)
        _watch(orders, state, signals, vital)
    except HeadLost as lost:
        print(lost, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            os.write(ready, str(lost).encode())
        return 1
    finally:
        clear_away(Path(orders.data_dir), state)
    return 0


def _watch(orders: HeadOrders, state: HeadState, signals: SignalPipe, vital: Mapping[int, str]) -> None:
    """Return when the head should end. If a vital process has ended, the agent first stops its runs with
    notice."""
    lost, lost_at = "", math.inf
    while not (signals.stop or _is_idle(state, LOST_IDLE_SECONDS if lost else orders.idle_stop_seconds)):
        ended = [vital[pid] for pid in reap() if pid in vital]
        if ended and not lost:
            lost, lost_at = ended[0], time.monotonic()
            print(
                f"{HEAD_LOST} {lost}; it ends when its runs have had their notice",
                file=sys.stderr,
                flush=True,
            )
            state.keepalive.touch()
            state.lost_file.write_text(lost)
        if time.monotonic() > lost_at + LEAVE_SECONDS or (lost and not _has_agent()):
            return
        signals.wait()


def begin(data_dir: Path) -> HeadState:
    """Write the state file with the identity of this process, so that the service can end it if Ray does not
    come up. Raises OSError."""
    own_process = process_id(os.getpid())
    ray, python = versions()
    state = HeadState(
        pid=own_process.pid,
        start_ticks=own_process.start_ticks,
        boot_id=boot_id(),
        address="",
        temp_dir=tempfile.mkdtemp(prefix="gpb-", dir="/tmp"),  # socket paths must stay short
        ray=ray,
        python=python,
    )
    try:
        write_state(data_dir, state)
    except OSError:
        shutil.rmtree(state.temp_dir)
        raise
    return state


def start_ray(
    node: NodeToStart, state: HeadState, signals: SignalPipe, others: Container[int] = ()
) -> dict[int, str]:
    """Start a node, and return its vital processes by pid once it is up; empty if it does not come up.
    Raises HeadLost.

    `others` are vital processes that existed before. Ray is imported in a child that ends after the start,
    because its modules take 60 MB of memory. The child notices late or never that a process has ended, so
    this process checks it.
    """
    starting = os.fork()
    if not starting:
        signals.close_in_child()
        _start_node_and_exit(node, state)
    seen: dict[ProcessId, str] = {}
    while not signals.stop:
        ended, status = os.waitpid(starting, os.WNOHANG)
        seen |= _vital_processes(node, others)
        missing = {name for process, name in seen.items() if not is_alive(process)}
        if ended and status == 0:
            missing |= node.vital.difference(seen.values())
        if missing:
            names = " and ".join(sorted(missing))
            why = last_words(state.ray_dir, say)
            raise HeadLost(
                f"{HEAD_LOST} {names} while it started{why}; it was ended, and another one is started"
            )
        if ended and status:
            last_words(state.ray_dir, say)
        if ended:
            return {process.pid: name for process, name in seen.items()} if status == 0 else {}
        signals.wait(START_WATCH_SECONDS)
    return {}


def say(line: str) -> None:
    """Write a line to the log of the head."""
    print(line, file=sys.stderr, flush=True)


def last_words(ray_dir: Path, say: Callable[[str], None]) -> str:
    """Pass the last lines of Ray's own logs to `say`, before the logs of a failed start are removed. Returns
    the error among them in parentheses; empty if there is none."""
    cause = ""
    for name in ("gcs_server.err", "gcs_server.out", "raylet.err", "raylet.out"):
        with contextlib.suppress(OSError):
            text = (ray_dir / "session_latest" / "logs" / name).read_text(errors="replace")
            lines = [line for line in text.splitlines() if line.strip() and not _FRAME.match(line)]
            if lines:
                say(f"the last lines of Ray's {name}:")
                for line in lines[-MAX_LINES:]:
                    say(f"  {line[:MAX_LINE]}")
            faults = [line for line in lines if _FAULT.search(line)]
            cause = faults[-1] if faults else cause
    about = _FAULT.split(cause, maxsplit=1)[-1].strip()
    return f" (Ray says: {about[:MAX_LINE]})" if about else ""


def _start_node_and_exit(node: NodeToStart, state: HeadState) -> NoReturn:
    try:
        os.environ.update(node.env)
        from gpubroker_server.adapters.ray.head.start import start_node

        state.address_file.write_text("{}\n{}\n".format(*start_node(node)))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _vital_processes(node: NodeToStart, others: Container[int]) -> dict[ProcessId, str]:
    """Return the vital processes. Those that have ended and are not reaped yet are included."""
    below = descendants(os.getpid(), process_table(with_ended=True))
    named = ((process, name_of(process.pid)) for process in below if process.pid not in others)
    return {process: name for process, name in named if name in node.vital}


def _has_agent() -> bool:
    below = descendants(os.getpid(), process_table())
    return any(name_of(process.pid).startswith(AGENT) for process in below)


def reap() -> set[int]:
    """Reap all children that have ended, adopted ones included, and return their pids. Raises
    ChildProcessError if there is no child."""
    ended = set()
    while pid := os.waitpid(-1, os.WNOHANG)[0]:
        ended.add(pid)
    return ended


def _is_idle(state: HeadState, most_seconds: float) -> bool:
    """Return True if no agent has touched the keepalive file for this time."""
    try:
        useful_at = state.keepalive.stat().st_mtime
    except OSError:
        # A cleaner of /tmp removed the file, which says nothing about the runs.
        with contextlib.suppress(OSError):
            state.keepalive.touch()
        return False
    return time.time() - useful_at > most_seconds


def clear_away(data_dir: Path, state: HeadState) -> None:
    """Kill all processes until not even a zombie is left, and remove the directory of the session."""
    with contextlib.suppress(ChildProcessError):
        while True:
            kill_all(descendants(os.getpid(), process_table()))
            reap()
            time.sleep(0.01)
    shutil.rmtree(state.temp_dir, ignore_errors=True)
    published = read_state(data_dir)
    if published is not None and published.pid == os.getpid():
        state_file(data_dir).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
