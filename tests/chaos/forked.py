"""`gpubroker serve` and its like, forked from a process in which everything is imported already.

The same program and a process of its own all the same; only its interpreter need not start each time.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from tests.e2e.service_process import ROOT, BrokerProcess, GatewayProcess, ServiceProcess

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "gpubroker_server.__main__",
        "gpubroker_server.adapters.sql.migrate",
        "gpubroker_server.bootstrap.broker_role",
        "gpubroker_server.bootstrap.commands",
        "gpubroker_server.bootstrap.gateway_role",
        "uvicorn.protocols.http.httptools_impl",
        "tests.chaos.forked",
    ]
)
LATE = "was not imported before the fork"


class Forking(ServiceProcess):
    """Starts quickly, unless something is to be done before its program is executed. It has no Ray to leave
    behind, unless whoever started it sees to that."""

    def spawn(self, begin: Callable[[], None] | None = None) -> Any:
        if begin is not None:
            return super().spawn(begin)
        words = (self.command, str(self._config), str(self._log))
        started = _context.Process(target=_run, args=(*words, self._env))
        started.start()
        return Forked(started)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.terminate()


class ForkedService(Forking):
    """`gpubroker serve`."""


class ForkedServiceOnRay(ForkedService):
    """With a local Ray, which is stopped with it."""

    def stop(self) -> None:
        ServiceProcess.stop(self)


class ForkedGateway(Forking, GatewayProcess):
    """`gpubroker gateway`."""


class ForkedBroker(Forking, BrokerProcess):
    """`gpubroker broker`."""


class Forked:
    """What `ServiceProcess` asks of a subprocess.Popen."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self.poll()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _TellsWhatIsLate:
    """Each module of ours that a process must import by itself costs all of them as much at every start."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name.startswith("gpubroker_server."):
            print(name, LATE, flush=True)


def _run(command: str, config: str, log: str, env: dict[str, str]) -> None:
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(env)
    with open(log, "ab") as lines:
        os.dup2(lines.fileno(), sys.stdout.fileno())
        os.dup2(lines.fileno(), sys.stderr.fileno())
    sys.meta_path.insert(0, _TellsWhatIsLate)
    sys.argv = ["gpubroker", command, "--config", config]
    from gpubroker_server.__main__ import main

    main()
