"""The deployments of chaos runs: their processes, and how one is killed."""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import httpx
import psutil
from gpubroker import BrokerError
from gpubroker_server.adapters.ray.head.head import read_state

from tests.chaos.forked import ForkedBroker, ForkedGateway, ForkedService, ForkedServiceOnRay
from tests.chaos.load import Kind, RealTasks, SimulatedTasks
from tests.chaos.witness import Observer, lines_of
from tests.e2e.service_process import GIB, ServiceProcess, until

DEVICE_MB = 24 * GIB
DRAIN_SECONDS = 240.0
STARTS_KILLED = 0.15
"""The share of restarts that are killed before they are ready."""
FIND_SECONDS = 60.0
"""How long to look for a process to kill; one that was killed before may not be back yet."""


class Deployment:
    """One process on the simulated engine."""

    targets: ClassVar[Sequence[str]] = ("main",)
    settings: ClassVar[Mapping[str, Any]] = {"engine": "simulated"}
    process: ClassVar[type[ServiceProcess]] = ForkedService

    def __init__(
        self,
        folder: Path,
        url: str,
        urls: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`url`: of the database. `urls`: of the database, for processes with their own, by name."""
        self.folder = folder
        self._settings = {
            "entrypoints": ["tests.chaos.jobs:*"],
            "policy": {"sample_period_seconds": 0.5, "kill_patience_seconds": 0.5},
            "blob_dir": str(folder / "objects"),
            **self.settings,
            **(settings or {}),
        }
        self._url, self._urls = url, urls or {}
        self.service = self.process_of(self.process, "data")
        self.observer = Observer(folder / "witness", folder / "seen")
        self.kills: dict[str, int] = {}

    def process_of(self, process: type[ServiceProcess], name: str, **more: Any) -> ServiceProcess:
        url = self._urls.get(name, self._url)
        return process(self.folder / name, database_url=url, **self._settings, **more)

    @property
    def data_dirs(self) -> list[Path]:
        return [self.service.data_dir]

    def start(self) -> None:
        self.service.start()

    def stop(self) -> None:
        self.service.stop()

    def kind(self) -> Kind:
        return SimulatedTasks()

    def kill(self, target: str, chance: Random) -> None:
        """SIGKILL a process of this kind, and start it again unless the service does."""
        if target == "main":
            self.service.kill_9()
            self._count("main")
            while chance.random() < STARTS_KILLED:
                self._kill_a_start(chance)
            self.service.start()

    def drain(self) -> None:
        """Wait until every task has ended and all memory is released."""
        broker = self.service.broker
        live = ("pending", "admitted", "running", "stopping")

        def is_quiet() -> bool:
            stats = broker.stats()
            return not any(getattr(stats.tasks, state) for state in live) and stats.gpu.leased_mb == 0

        until(is_quiet, "every task has ended and all memory is released", DRAIN_SECONDS)

    def _kill_a_start(self, chance: Random) -> None:
        started = self.service.spawn()
        time.sleep(chance.uniform(0.05, 1.5))  # at any point of its start
        started.kill()
        started.wait()
        self._count("main while it starts")

    def _count(self, what: str) -> None:
        self.kills[what] = self.kills.get(what, 0) + 1


class GatewaysAndBrokers(Deployment):
    """Two gateways and two brokers on one PostgreSQL, on the simulated engine."""

    targets = ("gateway", "leader", "standby", "leader")
    process = ForkedGateway

    def __init__(
        self,
        folder: Path,
        url: str,
        urls: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(folder, url, urls, settings)
        self.gateways = [self.service, self.process_of(ForkedGateway, "other")]
        self.brokers = [self.broker(name) for name in ("one", "two")]

    def broker(self, name: str) -> ServiceProcess:
        return self.process_of(ForkedBroker, name)

    @property
    def data_dirs(self) -> list[Path]:
        return [gateway.data_dir for gateway in self.gateways]

    def start(self) -> None:
        for process in (*self.gateways, *self.brokers):
            process.start()

    def stop(self) -> None:
        for process in (*self.gateways, *self.brokers):
            process.stop()

    def kill(self, target: str, chance: Random) -> None:
        killed = (
            chance.choice(self.gateways)
            if target == "gateway"
            else self.broker_which(leads=target == "leader")
        )
        if killed is not None:
            killed.kill_9()
            self._count(target)
            time.sleep(chance.choice([0.0, 0.0, 4.0]))  # sometimes long enough for a takeover
            killed.start()

    def broker_which(self, *, leads: bool) -> ServiceProcess | None:
        """None if no gateway answers."""
        with suppress(httpx.HTTPError, BrokerError):
            holder = str(self.service.broker.stats().leader.holder)
            return next((one for one in self.brokers if holder.endswith(f":{one.pid}") is leads), None)
        return None


class OnRay(Deployment):
    """One process with a local Ray; tasks are real processes."""

    targets = ("main", "driver", "agent", "run", "shared runner", "raylet")
    process = ForkedServiceOnRay
    settings: ClassVar[Mapping[str, Any]] = {"ray": {"spares": 2, "warm_runners": 1}}

    def kind(self) -> Kind:
        return RealTasks(self.folder / "witness")

    def kill(self, target: str, chance: Random) -> None:
        if target == "main":
            super().kill(target, chance)
            return
        deadline = time.monotonic() + FIND_SECONDS
        while time.monotonic() < deadline:
            with suppress(ProcessLookupError):  # it ended meanwhile
                pids = self._pids(target)
                if pids:
                    os.kill(chance.choice(pids), signal.SIGKILL)
                    self._count(target)
                    return
            time.sleep(0.02)

    def _pids(self, target: str) -> list[int]:
        from tests.e2e.ray_lab import (  # loads Ray, which takes a second
            agents_of,
            command_lines,
        )

        head = read_state(self.service.data_dir)
        match target:
            case "driver":
                with suppress(psutil.Error, AssertionError):
                    return [self.service.driver().pid]
            case "agent" if head is not None:
                return agents_of(head)
            case "raylet" if head is not None:
                return [pid for pid in command_lines("raylet/raylet") if os.getsid(pid) == head.pid]
            case "run":
                return self.observer.pids()
            case "shared runner":
                shared = [
                    line["pid"] for line in lines_of(self.folder / "witness") if line.get("devices") == []
                ]
                return shared[-1:]
        return []


DEPLOYMENTS: dict[str, type[Deployment]] = {
    "simulated": Deployment,
    "gateways": GatewaysAndBrokers,
    "ray": OnRay,
}
