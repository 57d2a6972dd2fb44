"""The process around a cluster on this machine. It starts the nodes, adds workers, and leaves no process or
file behind.

The program is started as `python -m gpubroker_server.adapters.ray.cluster.supervisor FOLDER SAYING LIFE`, in
a session of its own, so that Ctrl-C does not reach Ray. It writes a line of JSON to descriptor SAYING for
each node that runs. It ends when descriptor LIFE closes, because then the command that started it has ended.
"""

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gpubroker.runtime.process import adopt_orphans
from msgspec.structs import replace

from gpubroker_server.adapters.ray.cluster.layout import HEAD, ClusterLayout, worker_name
from gpubroker_server.adapters.ray.head.head import LOG, HeadState, write_state
from gpubroker_server.adapters.ray.head.supervisor import (
    HeadLost,
    SignalPipe,
    begin,
    clear_away,
    reap,
    say,
    start_ray,
)
from gpubroker_server.adapters.ray.processes import ProcessId, descendants, kill_all, process_table

LAYOUT = "layout.json"
CONTROL = "control"
"""The name of the socket for requests. It is in a directory of mode 0700."""
LOOK_SECONDS = 60.0
"""The longest wait for a signal or a request."""
STARTS = 3
"""The number of failed starts after which a node is given up."""
PAUSE_SECONDS = 5.0
"""The pause after the first failed start of a node. It doubles with each further one."""
MAX_SAID = 2000
REQUEST_SECONDS = 5.0
"""The time within which a client that has connected must send its request."""


class ClusterEnded(Exception):
    """A node that the cluster needs is gone or did not start. The message says which."""


def main() -> int:
    folder, descriptor, life = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    signals = SignalPipe()
    adopt_orphans()
    with os.fdopen(descriptor, "w", buffering=1) as output, os.fdopen(life, "rb", 0) as lifeline:
        state = begin(folder)
        layout = ClusterLayout.from_json((folder / LAYOUT).read_text())
        cluster = Supervisor(folder, layout, state, signals)
        try:
            with _listening(Path(state.temp_dir) / CONTROL) as control:
                for message in cluster.start(folder):
                    output.write(json.dumps(message) + "\n")
                cluster.watch(control, lifeline)
        except (ClusterEnded, BrokenPipeError) as ended:
            print(ended, file=sys.stderr, flush=True)
            with contextlib.suppress(OSError):
                output.write(json.dumps({"fault": str(ended)}) + "\n")
            return 1
        finally:
            clear_away(folder, state)
    return 0


def _listening(path: Path) -> socket.socket:
    control = socket.socket(socket.AF_UNIX)
    control.bind(str(path))
    control.listen()
    return control


class Supervisor:
    def __init__(self, folder: Path, layout: ClusterLayout, state: HeadState, signals: SignalPipe) -> None:
        self._folder = folder
        self._layout = layout
        self._state = state
        self._signals = signals
        self._head: dict[int, str] = {}
        """The vital processes of the head, by pid."""
        self._workers: dict[int, int] = {}
        """The pid of each worker's raylet, by the number of the worker."""

    def start(self, folder: Path) -> Iterable[Mapping[str, Any]]:
        """Start all nodes, one after the other, and yield a message about each. Raises ClusterEnded."""
        self._head = self._start(0)
        self._state = replace(self._state, address=self._state.address_file.read_text().splitlines()[0])
        write_state(folder, self._state)
        yield self._described(0)
        for number in range(1, self._layout.workers + 1):
            if self._signals.stop:
                return
            self._workers[number] = next(iter(self._start(number)), 0)
            yield self._described(number)
        yield {"up": True}

    def watch(self, control: socket.socket, lifeline: Any) -> None:
        """Answer requests until the cluster should end. Raises ClusterEnded."""
        while not self._signals.stop:
            ready = self._signals.wait(LOOK_SECONDS, control.fileno(), lifeline.fileno())
            self._note_ended(reap())
            if lifeline.fileno() in ready:
                return
            if control.fileno() in ready:
                self._answer(control)

    def _start(self, number: int) -> dict[int, str]:
        """Start a node, and return its vital processes; empty if the cluster is being stopped. A failed
        start is repeated, because a start may fail on a busy machine. Raises ClusterEnded."""
        node = self._layout.node(number, self._state.address, None if number else self._state.ray_dir)
        why = ""
        for attempt in range(STARTS):
            # Processes of an earlier attempt that are not reaped yet do not belong to this one.
            earlier = set(descendants(os.getpid(), process_table(with_ended=True)))
            try:
                again = replace(node, chooses_ports=attempt > 0)
                vital = start_ray(again, self._state, self._signals, {process.pid for process in earlier})
            except HeadLost as lost:
                vital, why = {}, str(lost)
                say(why)
            if vital:
                return vital
            self._kill_all_but(earlier)
            if self._signals.stop:
                return {}
            if attempt + 1 < STARTS:
                say(f"node {node.name} did not start; trying again in {PAUSE_SECONDS * 2**attempt:g} s")
                self._signals.wait(PAUSE_SECONDS * 2**attempt)
        raise ClusterEnded(f"node {node.name} did not start in {STARTS} attempts: {why or 'Ray failed'}")

    def _below(self) -> list[ProcessId]:
        return descendants(os.getpid(), process_table())

    def _kill_all_but(self, others: set[ProcessId]) -> None:
        """Kill the processes that a failed start has left. `others` existed before it. Processes that Ray
        has meanwhile started in other nodes are spared; they are descendants of those nodes' raylets."""
        table = process_table()
        spared = {process for raylet in self._workers.values() for process in descendants(raylet, table)}
        spared |= {process for vital in self._head for process in descendants(vital, table)}
        kill_all([process for process in self._below() if process not in others | spared])

    def _note_ended(self, ended: set[int]) -> None:
        for pid, name in self._head.items():
            if pid in ended:
                raise ClusterEnded(f"{name} of the head has ended, and with it the cluster")
        for number, raylet in list(self._workers.items()):
            if raylet in ended:
                print(f"{worker_name(number)} has ended; its GPUs are free", file=sys.stderr, flush=True)
                del self._workers[number]

    def _answer(self, control: socket.socket) -> None:
        with control.accept()[0] as client, contextlib.suppress(OSError):
            client.settimeout(REQUEST_SECONDS)
            asked = client.recv(64)
            answer = self._add_worker() if asked == b"add-worker" else self._status()
            client.sendall(json.dumps(answer).encode())

    def _add_worker(self) -> Mapping[str, Any]:
        number = self._layout.next_worker(self._workers.keys())
        if isinstance(number, str):
            return {"refused": number}
        try:
            vital = self._start(number)
        except ClusterEnded as fault:
            tail = (self._folder / LOG).read_text(errors="replace").strip()[-MAX_SAID:]
            return {"refused": f"{fault}. The log of the cluster ends:\n{tail}"}
        if not vital:
            return {"refused": f"the cluster is being stopped, so {worker_name(number)} was not added"}
        self._workers[number] = next(iter(vital))
        return self._described(number)

    def _status(self) -> Mapping[str, Any]:
        nodes = [self._described(number) for number in (0, *sorted(self._workers))]
        free = len(self._layout.gpus) - len(nodes) * self._layout.gpus_per_node
        return {
            "address": self._state.address,
            "nodes": nodes,
            "gpus": len(self._layout.gpus),
            "gpus_left": free,
        }

    def _described(self, number: int) -> Mapping[str, Any]:
        gpus = self._layout.gpus_of(number)
        return {
            "node": worker_name(number) if number else HEAD,
            "address": self._state.address,
            "gpus": [gpu.index for gpu in gpus],
            "cpus": self._layout.cpus_per_node,
            "worker_units": self._layout.worker_units,
        }


if __name__ == "__main__":
    sys.exit(main())
