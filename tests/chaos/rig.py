"""A service under fire: its processes, and who of them is killed."""

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
from tests.chaos.load import Kind, Waits, Works
from tests.chaos.witness import Watch, lines_of
from tests.e2e.service_process import GIB, ServiceProcess, until

DEVICE_MB = 24 * GIB
DRAIN_SECONDS = 240.0
STARTS_KILLED = 0.15
"""Of the restarts, so many are killed before they are ready."""
SHOW_SECONDS = 60.0
"""In which a process that is to be killed shows itself: what was killed before may not be back yet."""


class Rig:
    """A service on the engine that only waits. All that can be killed is its process."""

    targets: ClassVar[Sequence[str]] = ("main",)
    settings: ClassVar[Mapping[str, Any]] = {"engine": "simulated"}
    process: ClassVar[type[ServiceProcess]] = ForkedService

    def __init__(
        self,
        folder: Path,
        url: str,
        ways: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`ways`: the URLs by which processes go to the database that have one of their own, by name."""
        self.folder = folder
        self._given = {
            "entrypoints": ["tests.chaos.jobs:*"],
            "policy": {"sample_period_seconds": 0.5, "kill_patience_seconds": 0.5},
            "blob_dir": str(folder / "objects"),
            **self.settings,
            **(settings or {}),
        }
        self._url, self._ways = url, ways or {}
        self.service = self.made(self.process, "data")
        self.watch = Watch(folder / "witness", folder / "seen")
        self.kills: dict[str, int] = {}

    def made(self, process: type[ServiceProcess], name: str, **more: Any) -> ServiceProcess:
        url = self._ways.get(name, self._url)
        return process(self.folder / name, database_url=url, **self._given, **more)

    @property
    def homes(self) -> list[Path]:
        return [self.service.data_dir]

    def start(self) -> None:
        self.service.start()

    def stop(self) -> None:
        self.service.stop()

    def kind(self) -> Kind:
        return Waits()

    def kill(self, target: str, chance: Random) -> None:
        """SIGKILL, and start what does not start again by itself."""
        if target == "main":
            self.service.kill_9()
            self._count("main")
            while chance.random() < STARTS_KILLED:
                self._kill_a_start(chance)
            self.service.start()

    def settle(self) -> None:
        """Wait until everything has come to its end and has given back what it had."""
        broker = self.service.broker
        live = ("pending", "admitted", "running", "stopping")

        def is_quiet() -> bool:
            stats = broker.stats()
            return not any(stats.tasks.get(state) for state in live) and stats.gpu["leased_mb"] == 0

        until(is_quiet, "every task has ended and all memory is free", DRAIN_SECONDS)

    def _kill_a_start(self, chance: Random) -> None:
        started = self.service.spawn()
        time.sleep(chance.uniform(0.05, 1.5))  # wherever it is by then
        started.kill()
        started.wait()
        self._count("main while it starts")

    def _count(self, what: str) -> None:
        self.kills[what] = self.kills.get(what, 0) + 1


class SiteRig(Rig):
    """Two gateways and two brokers on one PostgreSQL, on the engine that only waits."""

    targets = ("gateway", "leader", "standby", "leader")
    process = ForkedGateway

    def __init__(
        self,
        folder: Path,
        url: str,
        ways: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(folder, url, ways, settings)
        self.gateways = [self.service, self.made(ForkedGateway, "other")]
        self.brokers = [self.broker(name) for name in ("one", "two")]

    def broker(self, name: str) -> ServiceProcess:
        return self.made(ForkedBroker, name)

    @property
    def homes(self) -> list[Path]:
        return [gateway.data_dir for gateway in self.gateways]

    def start(self) -> None:
        for process in (*self.gateways, *self.brokers):
            process.start()

    def stop(self) -> None:
        for process in (*self.gateways, *self.brokers):
            process.stop()

    def kill(self, target: str, chance: Random) -> None:
        struck = (
            chance.choice(self.gateways)
            if target == "gateway"
            else self.broker_that(leads=target == "leader")
        )
        if struck is not None:
            struck.kill_9()
            self._count(target)
            time.sleep(chance.choice([0.0, 0.0, 4.0]))  # at times long enough for the standby to lead
            struck.start()

    def broker_that(self, *, leads: bool) -> ServiceProcess | None:
        """None if nobody can tell."""
        with suppress(httpx.HTTPError, BrokerError):
            holder = str(self.service.broker.stats().leader["holder"])
            return next((one for one in self.brokers if holder.endswith(f":{one.pid}") is leads), None)
        return None


class RayRig(Rig):
    """A service with a local Ray, whose tasks are real processes."""

    targets = ("main", "driver", "agent", "run", "shared runner", "raylet")
    process = ForkedServiceOnRay
    settings: ClassVar[Mapping[str, Any]] = {"ray": {"spares": 2, "warm_runners": 1}}

    def kind(self) -> Kind:
        return Works(self.folder / "witness")

    def kill(self, target: str, chance: Random) -> None:
        if target == "main":
            super().kill(target, chance)
            return
        deadline = time.monotonic() + SHOW_SECONDS
        while time.monotonic() < deadline:
            with suppress(ProcessLookupError):  # it ended while we looked
                pids = self._pids(target)
                if pids:
                    os.kill(chance.choice(pids), signal.SIGKILL)
                    self._count(target)
                    return
            time.sleep(0.02)

    def _pids(self, target: str) -> list[int]:
        from tests.e2e.ray_lab import (  # loads Ray, which takes the other rigs a second
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
                return self.watch.pids()
            case "shared runner":
                shared = [
                    line["pid"] for line in lines_of(self.folder / "witness") if line.get("devices") == []
                ]
                return shared[-1:]
        return []


RIGS: dict[str, type[Rig]] = {"simulated": Rig, "site": SiteRig, "ray": RayRig}
