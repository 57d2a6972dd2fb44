"""`gpubroker serve`, `gateway` and `broker`, forked from a process that has imported everything already.

Each is a process of its own; only the start of the interpreter and the imports are saved.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.service_process import BrokerProcess, GatewayProcess, ServiceProcess
from tests.patience import PATIENCE_SECONDS

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
    """Starts by a fork. Does not stop a local Ray."""

    def spawn(self, begin: Callable[[], None] | None = None) -> Any:
        """`begin` is a function of a module: the new process gets its name."""
        return self._fork(self.command, self._log, begin)

    def _fork(self, command: str, log: Path, begin: Callable[[], None] | None = None) -> "Forked":
        arguments = (command, str(self._config), str(log), self._env, str(self._cwd), begin)
        started = _context.Process(target=_run, args=arguments)
        started.start()
        return Forked(started)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.terminate()


class ForkedService(Forking):
    """`gpubroker serve`."""


class ForkedServiceOnRay(ForkedService):
    """`gpubroker serve` with a local Ray, which is stopped with it."""

    def stop(self) -> None:
        said = self._log.with_suffix(".down")
        assert self._fork("down", said).wait(PATIENCE_SECONDS) == 0, said.read_text(encoding="utf-8")
        if self._process is not None:
            self._process.wait(PATIENCE_SECONDS)


class ForkedGateway(Forking, GatewayProcess):
    """`gpubroker gateway`."""


class ForkedBroker(Forking, BrokerProcess):
    """`gpubroker broker`."""


class Forked:
    """The part of subprocess.Popen that `ServiceProcess` uses."""

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


class _ReportsLateImports:
    """Prints modules of the service that were not preloaded: they slow down every start."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name.startswith("gpubroker_server."):
            print(name, LATE, flush=True)


def _run(
    command: str, config: str, log: str, env: dict[str, str], cwd: str, begin: Callable[[], None] | None
) -> None:
    if begin is not None:
        begin()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    with open(log, "ab") as lines:
        os.dup2(lines.fileno(), sys.stdout.fileno())
        os.dup2(lines.fileno(), sys.stderr.fileno())
    sys.meta_path.insert(0, _ReportsLateImports)
    sys.argv = ["gpubroker", command, "--config", config]
    from gpubroker_server.__main__ import main

    main()
