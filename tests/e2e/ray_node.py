"""One more Ray node on this machine, in a process of its own."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from gpubroker_server.adapters.ray.processes import kill_all, name_of, process_table, send_signal, session_of

from tests.e2e.ray_lab import is_there
from tests.e2e.service_process import until
from tests.patience import PATIENCE_SECONDS


class RayNode:
    """A node that has joined a head on 127.0.0.1, and may be lost and come again."""

    def __init__(self, address: str, name: str, env: Mapping[str, str], cpus: int = 2) -> None:
        self.name = name
        self._command = [sys.executable, "-m", __name__, address, str(cpus), "0", ""]
        self._env = os.environ | env
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "RayNode":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.lose()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [*self._command, self.name], env=self._env, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdout is not None
        told, _, _ = select.select([self._process.stdout], [], [], PATIENCE_SECONDS)
        if not told or self._process.stdout.readline() != b"joined\n":
            self.lose()
            raise AssertionError(f"{self.name} has not joined within {PATIENCE_SECONDS:g} s")

    @property
    def is_there(self) -> bool:
        return self._process is not None

    def freeze(self) -> None:
        """Everything there stands still, as on a machine that hangs; nobody is told."""
        self.strike(signal.SIGSTOP)

    def thaw(self) -> None:
        self.strike(signal.SIGCONT)

    def strike(self, number: signal.Signals, name: str = "") -> None:
        """Signal every process there, or those of this name: `raylet`, `ray::NodeAgent`."""
        assert self._process is not None
        struck = [
            entry.id
            for entry in process_table().values()
            if session_of(entry.id.pid) == self._process.pid and name_of(entry.id.pid).startswith(name)
        ]
        assert struck, name
        for process in struck:
            send_signal(process, number)

    def kill(self) -> None:
        """As when its machine loses power: nobody says goodbye."""
        self._end(says_goodbye=False)

    def lose(self) -> None:
        """Everything that Ray has there ends: the agent, and the processes of runs, without a word of them.

        The raylet takes its leave, because Ray needs a quarter of a minute to miss one that does not.
        """
        self._end(says_goodbye=True)

    def _end(self, *, says_goodbye: bool) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        ours = [entry.id for entry in process_table().values() if session_of(entry.id.pid) == process.pid]
        raylets = [found.pid for found in ours if says_goodbye and name_of(found.pid) == "raylet"]
        for raylet in raylets:
            os.kill(raylet, signal.SIGTERM)
        until(lambda: not any(map(is_there, raylets)), "the raylet has left")
        kill_all(ours)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


class RayHead(RayNode):
    """A head on 127.0.0.1 that others run: it may be lost, and start again at the same port."""

    def __init__(self, port: int, name: str, env: Mapping[str, str], temp_dir: Path) -> None:
        super().__init__("", name, env)
        self._command[-2:] = str(port), str(temp_dir)


def start(address: str, cpus: str, port: str, temp_dir: str, name: str) -> None:
    """`ray start` refuses to join a head on 127.0.0.1; what it calls does not."""
    from gpubroker_server.adapters.ray.head.node_to_start import NodeToStart
    from gpubroker_server.adapters.ray.head.start import start_node

    home = Path(temp_dir) if temp_dir else None
    start_node(NodeToStart(80 * 2**20, home, head=address, name=name, port=int(port), cpus=int(cpus)))
    print("joined", flush=True)
    signal.pause()


if __name__ == "__main__":
    start(*sys.argv[1:])
