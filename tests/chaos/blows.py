"""PostgreSQL restarted as after a crash, and its backends killed, under load: how soon all goes on.

The load is a stated number of tasks per second, so that what is found says something of the service and not
of the machine it shares. Rates are those of answers: `202`, each with its id.
"""

import asyncio
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import psycopg
from gpubroker_server.adapters.sql.store import migrate

from tests.chaos.load import LINES, Load
from tests.chaos.rig import DEVICE_MB, Rig
from tests.chaos.verdict import judge
from tests.chaos.witness import lines_of
from tests.postgres import OwnServer, a_server_of_its_own

SUMMED = (
    "restarts", "backends_killed", "acknowledged", "lost", "accepted_twice", "double_leased_mb",
    "leases_left", "events", "blows", "back",
)  # fmt: skip
PER_SECOND = 60.0
VOLLEY = 10
"""Backends killed one after the other, as if it were one blow."""
_BETWEEN_SECONDS = 0.05
_OURS = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'gpubroker%'"


@dataclass(frozen=True)
class Blows:
    seed: int
    restarts: int
    kills: int
    window_seconds: float = 3.0
    """For which the rate is taken, before a blow and when all should go on."""
    back_seconds: float = 5.0
    """After which all should go on, counted from when PostgreSQL does."""


@dataclass(frozen=True)
class Blow:
    began_at: float
    ended_at: float


def run(blows: Blows) -> dict[str, Any]:
    """The record for the evidence. What is wrong is in it in words."""
    with tempfile.TemporaryDirectory(prefix="gpb-chaos-") as place, a_server_of_its_own() as server:
        migrate(server.url, "head")
        rig = Rig(Path(place), server.url)
        told = rig.folder / "told"
        load = Load(rig.homes, told, rig.kind(), f"{blows.seed}", LINES / PER_SECOND)
        chance = Random(f"{blows.seed}/blows")
        try:
            rig.start()
            struck = asyncio.run(_strike(blows, load, server, chance))
            rig.settle()
        finally:
            rig.stop()
        found = judge(server.url, rig.folder, load.contradictions, DEVICE_MB)
        return {
            "seed": blows.seed,
            "restarts": blows.restarts,
            "backends_killed": blows.kills,
            "acknowledged": found.acknowledged,
            "lost": found.lost,
            "accepted_twice": found.accepted_twice,
            "double_leased_mb": found.double_leased_mb,
            "leases_left": found.leases_left,
            "events": found.events,
            **_rates(blows, struck, sorted(line["at"] for line in lines_of(told))),
            "wrong": found.wrong,
        }


async def _strike(blows: Blows, load: Load, server: OwnServer, chance: Random) -> list[Blow]:
    volleys = [min(VOLLEY, blows.kills - done) for done in range(0, blows.kills, VOLLEY)]
    order = chance.sample([0] * blows.restarts + volleys, blows.restarts + len(volleys))
    submitting = asyncio.create_task(load.submit(sys.maxsize))
    await load.reaches(int(PER_SECOND))
    struck = []
    for kills in order:
        await asyncio.sleep(blows.window_seconds)
        began_at = time.time()
        await asyncio.to_thread(_kill if kills else _restart, server, kills, chance)
        struck.append(Blow(began_at, time.time()))
        await asyncio.sleep(blows.back_seconds + blows.window_seconds)
    submitting.cancel()
    with suppress(asyncio.CancelledError):
        await submitting
    return struck


def _restart(server: OwnServer, *_: Any) -> None:
    server.stop("immediate")
    server.start()


def _kill(server: OwnServer, kills: int, chance: Random) -> None:
    with psycopg.connect(server.url, autocommit=True) as connection:
        done = 0
        while done < kills:
            pids = [pid for (pid,) in connection.execute(_OURS)]
            if pids:
                connection.execute("SELECT pg_terminate_backend(%s)", [chance.choice(pids)])
                done += 1
            time.sleep(_BETWEEN_SECONDS)


def _rates(blows: Blows, struck: Sequence[Blow], answers: Sequence[float]) -> dict[str, Any]:
    def rate(begin: float) -> float:
        until = begin + blows.window_seconds
        return (bisect_left(answers, until) - bisect_left(answers, begin)) / blows.window_seconds

    before = [rate(blow.began_at - blows.window_seconds) for blow in struck]
    after = [rate(blow.ended_at + blows.back_seconds) for blow in struck]
    shares = sorted(late / early for early, late in zip(before, after, strict=True))
    gaps = sorted(answers[bisect_left(answers, blow.ended_at)] - blow.ended_at for blow in struck)
    return {
        "blows": len(struck),
        "back": sum(share >= 0.95 for share in shares),
        "offered_per_second": PER_SECOND,
        "per_second_before": _spread(before),
        "share_of_it_after": _spread(shares),
        "seconds_to_the_next_answer": _spread(gaps),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    ranked = sorted(values)
    at = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}
    return {name: round(ranked[round(share * (len(ranked) - 1))], 3) for name, share in at.items()}
