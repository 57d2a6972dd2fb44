"""Gateways and brokers that are asked to end, one after the other, under load on real Ray.

Each has so long for it as is stated, and then another one does its work: clients go to the other gateway, and
the other broker leads. Whatever runs goes on: no run is lost, and none begins a second time.
"""

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

from tests.chaos.databases import a_database
from tests.chaos.forked import ForkedBroker
from tests.chaos.kills import by_turns
from tests.chaos.load import Kind, Load, Works
from tests.chaos.rig import DEVICE_MB, SiteRig
from tests.chaos.rows import Answers
from tests.chaos.verdict import judge
from tests.chaos.witness import lines_of
from tests.e2e.hands import Hands
from tests.e2e.service_process import ServiceProcess, until

SUMMED = (
    "stops", "acknowledged", "lost", "accepted_twice", "double_leased_mb", "started_twice", "began_again",
    "released_early", "leases_left", "events", "runs_seen",
)  # fmt: skip
TARGETS = ("gateway", "leader", "standby", "leader")
DRAIN_SECONDS = 5.0
TAKEOVER_SECONDS = 0.5
HELD: Mapping[str, Mapping[str, Any]] = {
    "alone": {"gpu_mb": 4000, "priority": 100},
    "together": {"cpu": 0.05},
}
"""Runs that go on all the time, one of them in a process that others share. Nothing goes before them."""


@dataclass(frozen=True)
class Stops:
    seed: int
    stops: int
    tasks_per_stop: int
    targets: Sequence[str]


@dataclass
class Seen:
    """How long things took, in seconds."""

    to_end: list[float] = field(default_factory=list)
    without_a_leader: list[float] = field(default_factory=list)
    to_the_next_start: list[float] = field(default_factory=list)
    """From when the leader was asked to end until the next one let a task begin."""


class RaySite(SiteRig):
    """Two gateways and two brokers on one PostgreSQL. The brokers have one directory, so one local Ray."""

    settings: ClassVar[Mapping[str, Any]] = {
        "ray": {"spares": 2, "warm_runners": 1},
        "drain_seconds": DRAIN_SECONDS,
        "entrypoints": ["tests.chaos.jobs:*", "tests.e2e.work:*"],
    }

    def __init__(self, folder: Path, url: str, **settings: Any) -> None:
        """`settings`: besides those of all rigs."""
        self.url = url
        super().__init__(folder, url, settings=settings)
        self.seen = Seen()
        self._taken: list[tuple[float, float]] = []
        """When leaders were asked to end, and when the next one had the term."""

    def broker(self, name: str) -> ServiceProcess:
        return self.made(ForkedBroker, name, data_dir=str(self.folder / "brokers"))

    def start(self) -> None:
        processes = (*self.gateways, *self.brokers)
        with ThreadPoolExecutor(len(processes)) as together:
            list(together.map(lambda process: process.start(), processes))
        until(lambda: self.broker_that(leads=True) is not None, "one of the brokers leads")

    def stop(self) -> None:
        super().stop()
        ServiceProcess.stop(self.brokers[0])

    def kind(self) -> Kind:
        return Works(self.folder / "witness")

    def end(self, target: str, chance: Random) -> None:
        """As an init system does, and start it again once another one has taken over."""
        asked = (
            chance.choice(self.gateways)
            if target == "gateway"
            else self.broker_that(leads=target == "leader")
        )
        assert asked is not None, f"nobody can tell who is the {target}"
        [(term, _)] = self._lead()
        asked_at = time.time()
        assert asked.terminate() == 0, asked.log()
        self.seen.to_end.append(time.time() - asked_at)
        if target == "leader":
            until(lambda: self._lead()[0][0] > term, "the other one leads")
            [(_, taken_at)] = self._lead()
            self.seen.without_a_leader.append(taken_at - asked_at)
            self._taken.append((asked_at, taken_at))
        self._count(target)
        asked.start()

    def look_back(self) -> None:
        """When the next leader let the first task begin, of those who found one that waited."""
        for asked_at, taken_at in self._taken:
            [(at,)] = self._ask(f"SELECT min(at) FROM event WHERE kind = 'task.admitted' AND at > {taken_at}")
            if at is not None:
                self.seen.to_the_next_start.append(at - asked_at)

    def _lead(self) -> list[tuple[Any, ...]]:
        return self._ask("SELECT term, taken_at FROM leadership")

    def _ask(self, query: str) -> list[tuple[Any, ...]]:
        with closing(Answers(self.url)) as rows:
            return rows.to(query)

    def began_again(self) -> list[str]:
        """Tasks that were lost in the middle, or began more often than they were stopped for others."""
        rows = self._ask("SELECT id, preemptions, failures FROM task")
        begun = Counter(line["task"] for line in lines_of(self.folder / "witness") if line["what"] == "start")
        return [
            f"{id} began {begun[id]} times, was stopped for others {stopped} times and failed {failed} times"
            for id, stopped, failed in rows
            if failed or begun[id] > 1 + stopped
        ]


def run(stops: Stops) -> dict[str, Any]:
    """The record for the evidence. What is wrong is in it in words."""
    with (
        tempfile.TemporaryDirectory(prefix="gpb-chaos-") as place,
        a_database("postgres", Path(place)) as url,
    ):
        site = RaySite(Path(place), url)
        try:
            site.start()
            record = fire(site, stops)
            record["wrong"] += _too_long(site.seen)
            return record
        finally:
            site.stop()


def fire(site: RaySite, stops: Stops) -> dict[str, Any]:
    """How long things took is for the caller to judge."""
    load = Load(site.homes, site.folder / "told", site.kind(), f"{stops.seed}")
    with site.watch:
        wrong = _among_what_runs(site, lambda: asyncio.run(_ask_to_end(stops, site, load)))
        site.settle()
    site.look_back()
    again = site.began_again()
    found = judge(site.url, site.folder, load.contradictions, DEVICE_MB)
    return {
        "seed": stops.seed,
        "stops": dict(sorted(site.kills.items())),
        "acknowledged": found.acknowledged,
        "lost": found.lost,
        "accepted_twice": found.accepted_twice,
        "double_leased_mb": found.double_leased_mb,
        "started_twice": found.started_twice,
        "began_again": len(again),
        "released_early": found.released_early,
        "leases_left": found.leases_left,
        "events": found.events,
        "runs_seen": found.runs,
        "seconds": {name: sorted(round(one, 3) for one in many) for name, many in vars(site.seen).items()},
        "wrong": [*wrong, *again[:20], *found.wrong],
    }


def _among_what_runs(site: RaySite, act: Callable[[], None]) -> list[str]:
    """Which of the runs that were there all the time did not go on."""
    folder = site.folder / "held"
    folder.mkdir()
    hands = Hands(site.service.broker, folder)
    held = [hands.at_work(name, **demand) for name, demand in HELD.items()]
    act()
    hands.broker = site.service.broker
    ended = hands.end(*held)
    return [f"{task.name} ended in its attempt {task.attempt}" for task in ended if task.attempt != 1]


async def _ask_to_end(stops: Stops, site: RaySite, load: Load) -> None:
    chance = Random(f"{stops.seed}/stops")
    for target in islice(by_turns(stops.targets, chance), stops.stops):
        submitting = asyncio.create_task(load.submit(stops.tasks_per_stop))
        await load.reaches(load.accepted + chance.randrange(stops.tasks_per_stop))
        await asyncio.to_thread(site.end, target, chance)
        await submitting


def _too_long(seen: Seen) -> list[str]:
    ends = [f"{seconds:.2f} s to end" for seconds in seen.to_end if seconds > DRAIN_SECONDS]
    gaps = [f"{seconds:.2f} s without a leader" for seconds in seen.without_a_leader]
    return [*ends, *(gap for gap, s in zip(gaps, seen.without_a_leader, strict=True) if s > TAKEOVER_SECONDS)]
