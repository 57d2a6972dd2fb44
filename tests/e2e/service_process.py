"""The whole service as its users start it: a process of its own, spoken to over HTTP only."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil
import yaml
from gpubroker import Broker, NewToken, Refused, Task

from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
GIB = 1024
OPEN = ["pending", "admitted", "running", "stopping"]


def is_running(broker: Broker, task: Task | str) -> bool:
    return broker.get(task).state == "running"


def until(true: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for a fact that only polling can see (a file, a process), with a deadline that fails the test."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain until {what}"
        time.sleep(0.02)


def environment(**changes: str) -> dict[str, str]:
    """Without the tester's own settings, which would win over those of the configuration file."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GPUBROKER_")} | changes


class ServiceProcess:
    """`gpubroker serve` on a data directory, which outlives it."""

    command = "serve"
    module = "gpubroker_server"
    python = sys.executable

    def __init__(
        self, home: Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT, **settings: object
    ) -> None:
        """`env`: variables that it gets besides the tester's. Modules are also looked for in `cwd`."""
        self.data_dir = home
        self._cwd = cwd
        self._env = environment(**(env or {}))
        self._config = home.with_suffix(".yaml")
        self._log = home.with_suffix(".log")
        defaults = {
            "data_dir": str(home),
            "port": 0,
            "entrypoints": ["tests.e2e.work:*"],
            "task_path": [str(ROOT)],
            "simulated_devices": [{"kind": "sim-24g", "memory_mb": 24 * GIB, "count": 2}],
        }
        self._config.write_text(yaml.safe_dump({**defaults, **settings}), encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None
        self._tenants: dict[str, NewToken] = {}

    def use(self, software: str) -> None:
        """From its next start on; `software`: folders to import it from, as in PYTHONPATH."""
        self._env["PYTHONPATH"] = software

    def __enter__(self) -> "ServiceProcess":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def spawn(self, begin: Callable[[], None] | None = None) -> subprocess.Popen[bytes]:
        """Start the process, which calls `begin` first, and wait for nothing."""
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [self.python, "-m", self.module, self.command, "--config", str(self._config)],
                stdout=log,
                stderr=log,
                env=self._env,
                cwd=self._cwd,
                preexec_fn=begin,
            )

    def start(self, begin: Callable[[], None] | None = None) -> "ServiceProcess":
        stale = self.data_dir / "client.json"
        before = stale.stat().st_mtime_ns if stale.exists() else 0
        self._process = self.spawn(begin)
        until(
            lambda: self._died() or (stale.exists() and stale.stat().st_mtime_ns != before),
            "the service says where it listens",
            PATIENCE_SECONDS,
        )
        until(lambda: self._died() or self._is_ready(), "the service is ready", PATIENCE_SECONDS)
        assert not self._died(), self.log()
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def url(self) -> str:
        return self._client()["url"]

    @property
    def token(self) -> str:
        """The admin's."""
        return self._client()["token"]

    @property
    def broker(self) -> Broker:
        client = self._client()
        return Broker(url=client["url"], token=client["token"])

    def of(self, tenant: str) -> Broker:
        """For one tenant, who may submit and nothing more."""
        if tenant not in self._tenants:
            scopes = ["tasks:read", "tasks:write"]
            about: dict[str, Any] = {"scopes": scopes, "tenant": tenant, "new_tenant": True}
            self._tenants[tenant] = self.broker.create_token(tenant, **about)
        return Broker(url=self.url, token=self._tenants[tenant].token)

    def _client(self) -> dict[str, str]:
        found: dict[str, str] = yaml.safe_load((self.data_dir / "client.json").read_text(encoding="utf-8"))
        return {name: found[name] for name in ("url", "token")}

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def driver(self) -> psutil.Process:
        """The Ray driver: the one child of the main process that talks to Ray."""
        drivers = [
            child
            for child in psutil.Process(self.pid).children()
            if "gpubroker_server.adapters.ray.driver.process" in child.cmdline()
        ]
        assert len(drivers) == 1, drivers
        return drivers[0]

    def clear(self) -> None:
        """End whatever a test has left for any tenant, and wait until nothing of it holds memory."""
        admin = self.broker
        for broker in (admin, *map(self.of, self._tenants)):
            for task in broker.list(state=OPEN):
                try:
                    broker.cancel(task, grace_seconds=0)
                except Refused as refused:  # it has ended since it was listed
                    if refused.code != "task-already-finished":
                        raise
        until(lambda: not any(getattr(admin.stats().tasks, state) for state in OPEN), "no task is open")
        until(lambda: all(gpu.leased_mb == 0 for gpu in admin.gpus()), "all memory is free again")

    def kill_9(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def ended(self) -> int:
        """Wait until it ends of itself; the exit code."""
        assert self._process is not None
        return self._process.wait(PATIENCE_SECONDS)

    def terminate(self) -> int:
        """SIGTERM, as an init system stops it: runs go on. The exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(PATIENCE_SECONDS)

    def stop(self) -> None:
        """`gpubroker down`: the service and its local Ray."""
        subprocess.run(
            [sys.executable, "-m", "gpubroker_server", "down", "--config", str(self._config)],
            check=True,
            capture_output=True,
            timeout=PATIENCE_SECONDS,
            env=self._env,
            cwd=self._cwd,
        )
        if self._process is not None:
            self._process.wait(PATIENCE_SECONDS)

    def _died(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def _is_ready(self) -> bool:
        try:
            found = yaml.safe_load((self.data_dir / "client.json").read_text(encoding="utf-8"))
            return httpx.get(f"{found['url']}/readyz", verify=False).status_code == 200
        except httpx.TransportError:
            return False


class GatewayProcess(ServiceProcess):
    """`gpubroker gateway`."""

    command = "gateway"


class BrokerProcess(ServiceProcess):
    """`gpubroker broker`: it has no HTTP; `up` is its word that it is there."""

    command = "broker"

    def start(self, begin: Callable[[], None] | None = None) -> "BrokerProcess":
        before = self.ups()
        self._process = self.spawn(begin)
        until(lambda: self._died() or self.ups() > before, "the broker is up", PATIENCE_SECONDS)
        assert not self._died(), self.log()
        return self

    def ups(self) -> int:
        return self.log().count("gpubroker broker is up") if self._log.exists() else 0

    def stop(self) -> None:
        """Its local Ray, if it has one, goes with it."""
        if self._process is not None and self._process.poll() is None:
            super().stop()
