"""Gateways and brokers stopped with SIGTERM, one after the other, under load on real Ray.

Each has to end within its drain time, and another one takes over: clients use the other gateway, the other
broker leads. Runs go on: none is lost, and none starts a second time.
"""

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from msgspec import Struct

from tests.chaos.database import Reader, a_database
from tests.chaos.deployment import DEVICE_MB, GatewaysAndBrokers
from tests.chaos.evidence import Evidence, add_seeds, on_database, run_seeds
from tests.chaos.forked import ForkedBroker
from tests.chaos.kill import in_rounds
from tests.chaos.load import Kind, Load, RealTasks
from tests.chaos.verdict import judge
from tests.chaos.witness import lines_of
from tests.e2e.hands import Hands
from tests.e2e.service_process import ServiceProcess, until

SUMMED = (
    "stops", "acknowledged", "lost", "accepted_twice", "double_leased_mb", "started_twice", "restarted_runs",
    "released_early", "leases_left", "events", "runs_seen",
)  # fmt: skip
TARGETS = ("gateway", "leader", "standby", "leader")
DRAIN_SECONDS = 5.0
TAKEOVER_SECONDS = 0.5
LONG_RUNS: Mapping[str, Mapping[str, Any]] = {
    "alone": {"gpu_mb": 4000, "priority": 100},
    "together": {"cpu": 0.05},
}
"""Tasks that run all the time, one of them in a shared process. Nothing preempts them."""


class Batch(Struct, frozen=True):
    seed: int
    stops: int
    tasks_per_stop: int
    targets: Sequence[str]
    every_seconds: float = 0.0
    """As of `Load`."""


@dataclass
class Durations:
    """In seconds, one value per stop."""

    to_end: list[float] = field(default_factory=list)
    without_a_leader: list[float] = field(default_factory=list)
    to_the_next_start: list[float] = field(default_factory=list)
    """From the SIGTERM to a leader until its successor admitted a task."""


class GatewaysAndBrokersOnRay(GatewaysAndBrokers):
    """Two gateways and two brokers on one PostgreSQL. The brokers share a data directory, so a local Ray."""

    settings: ClassVar[Mapping[str, Any]] = {
        "ray": {"spares": 2, "warm_runners": 1},
        "drain_seconds": DRAIN_SECONDS,
        "entrypoints": ["tests.chaos.jobs:*", "tests.e2e.work:*"],
    }

    def __init__(self, folder: Path, url: str, **settings: Any) -> None:
        """`settings`: in addition to those of all deployments."""
        self.url = url
        super().__init__(folder, url, settings=settings)
        self.durations = Durations()
        self._takeovers: list[tuple[float, float]] = []
        """(time of the SIGTERM to the leader, time at which its successor took the term)"""

    def broker(self, name: str) -> ServiceProcess:
        return self.process_of(ForkedBroker, name, data_dir=str(self.folder / "brokers"))

    def start(self) -> None:
        processes = (*self.gateways, *self.brokers)
        with ThreadPoolExecutor(len(processes)) as pool:
            list(pool.map(lambda process: process.start(), processes))
        until(lambda: self.broker_which(leads=True) is not None, "one of the brokers leads")

    def stop(self) -> None:
        super().stop()
        ServiceProcess.stop(self.brokers[0])

    def kind(self) -> Kind:
        return RealTasks(self.folder / "witness")

    def terminate(self, target: str, chance: Random) -> None:
        """SIGTERM, as from an init system; start it again after the takeover."""
        process = (
            chance.choice(self.gateways)
            if target == "gateway"
            else self.broker_which(leads=target == "leader")
        )
        assert process is not None, f"no gateway answers which broker is the {target}"
        [(term, _)] = self._leadership()
        signalled_at = time.time()
        assert process.terminate() == 0, process.log()
        self.durations.to_end.append(time.time() - signalled_at)
        if target == "leader":
            until(lambda: self._leadership()[0][0] > term, "the other broker leads")
            [(_, taken_at)] = self._leadership()
            self.durations.without_a_leader.append(taken_at - signalled_at)
            self._takeovers.append((signalled_at, taken_at))
        self._count(target)
        process.start()

    def measure_takeovers(self) -> None:
        """From the log: when each new leader admitted its first task, if one was waiting."""
        for signalled_at, taken_at in self._takeovers:
            [(at,)] = self._rows(
                f"SELECT min(at) FROM event WHERE kind = 'task.admitted' AND at > {taken_at}"
            )
            if at is not None:
                self.durations.to_the_next_start.append(at - signalled_at)

    def _leadership(self) -> list[tuple[Any, ...]]:
        return self._rows("SELECT term, taken_at FROM leadership")

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        with closing(Reader(self.url)) as reader:
            return reader.rows(query)

    def restarted_runs(self) -> list[str]:
        """Tasks that failed, or started more often than they were preempted."""
        rows = self._rows("SELECT id, preemptions, failures FROM task")
        lines = lines_of(self.folder / "witness")
        starts = Counter(line["task"] for line in lines if line["what"] == "start")
        return [
            f"{id} started {starts[id]} times, was preempted {preempted} times and failed {failed} times"
            for id, preempted, failed in rows
            if failed or starts[id] > 1 + preempted
        ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stops", type=int, default=20, help="stops per batch")
    parser.add_argument("--tasks-per-stop", type=int, default=40, help="tasks submitted per stop")
    parser.add_argument(
        "--target", action="append", choices=sorted({*TARGETS}), help="process to stop (may be repeated)"
    )
    add_seeds(parser)


def command(options: argparse.Namespace) -> None:
    evidence = Evidence("shutdown", SUMMED, trials=("stops", "acknowledged"))
    how = options.stops, options.tasks_per_stop, options.target or TARGETS
    run_seeds(options, evidence, lambda seed: run(Batch(seed, *how)), **on_database("postgres"))


def run(batch: Batch) -> dict[str, Any]:
    """The record of this batch; `wrong` lists what is wrong, in words."""
    with (
        tempfile.TemporaryDirectory(prefix="gpb-chaos-") as place,
        a_database("postgres", Path(place)) as url,
    ):
        deployment = GatewaysAndBrokersOnRay(Path(place), url)
        try:
            deployment.start()
            record = stop_under_load(deployment, batch)
            record["wrong"] += _too_long(deployment.durations)
            return record
        finally:
            deployment.stop()


def stop_under_load(deployment: GatewaysAndBrokersOnRay, batch: Batch) -> dict[str, Any]:
    """The record, without a judgement on durations."""
    answers, kind = deployment.folder / "answers", deployment.kind()
    load = Load(deployment.data_dirs, answers, kind, f"{batch.seed}", batch.every_seconds)
    with deployment.observer:
        wrong = _beside_long_runs(deployment, lambda: asyncio.run(_stop_processes(batch, deployment, load)))
        deployment.drain()
    deployment.measure_takeovers()
    restarted = deployment.restarted_runs()
    verdict = judge(deployment.url, deployment.folder, load.contradictions, DEVICE_MB)
    durations = vars(deployment.durations)
    return {
        "seed": batch.seed,
        "stops": dict(sorted(deployment.kills.items())),
        **verdict.counts("acknowledged", "lost", "accepted_twice", "double_leased_mb", "started_twice"),
        "restarted_runs": len(restarted),
        **verdict.counts("released_early", "leases_left", "events", "runs_seen"),
        "slowest_answer_seconds": round(load.slowest_seconds, 3),
        "seconds": {name: sorted(round(one, 3) for one in values) for name, values in durations.items()},
        "wrong": [*wrong, *restarted[:20], *verdict.wrong],
    }


def _beside_long_runs(deployment: GatewaysAndBrokersOnRay, act: Callable[[], None]) -> list[str]:
    """The long runs that did not survive `act`."""
    folder = deployment.folder / "held"
    folder.mkdir()
    hands = Hands(deployment.service.broker, folder)
    held = [hands.at_work(name, **demand) for name, demand in LONG_RUNS.items()]
    act()
    hands.broker = deployment.service.broker
    ended = hands.end(*held)
    return [f"{task.name} ended in attempt {task.attempt}" for task in ended if task.attempt != 1]


async def _stop_processes(batch: Batch, deployment: GatewaysAndBrokersOnRay, load: Load) -> None:
    chance = Random(f"{batch.seed}/shutdown")
    for target in islice(in_rounds(batch.targets, chance), batch.stops):
        submitting = asyncio.create_task(load.submit(batch.tasks_per_stop))
        await load.reaches(load.accepted + chance.randrange(batch.tasks_per_stop))
        await asyncio.to_thread(deployment.terminate, target, chance)
        await submitting


def _too_long(durations: Durations) -> list[str]:
    ends = [f"{seconds:.2f} s to end" for seconds in durations.to_end if seconds > DRAIN_SECONDS]
    gaps = [seconds for seconds in durations.without_a_leader if seconds > TAKEOVER_SECONDS]
    return [*ends, *(f"{seconds:.2f} s without a leader" for seconds in gaps)]
