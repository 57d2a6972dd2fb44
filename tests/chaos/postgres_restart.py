"""Immediate restarts of PostgreSQL and killed backends, under load: how soon the service recovers.

The load is a fixed number of tasks per second, so that the result depends on the service and less on the
machine. Rates count `202` answers.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import psycopg
from gpubroker_server.adapters.sql.store import migrate
from msgspec import Struct

from tests.chaos.deployment import DEVICE_MB, Deployment
from tests.chaos.evidence import Evidence, add_seeds, on_database, run_seeds
from tests.chaos.load import CLIENTS, Load
from tests.chaos.verdict import judge
from tests.chaos.witness import lines_of
from tests.postgres import OwnServer, a_server_of_its_own

SUMMED = (
    "restarts", "backends_killed", "acknowledged", "lost", "accepted_twice", "double_leased_mb",
    "leases_left", "events", "interruptions", "recovered",
)  # fmt: skip
PER_SECOND = 60.0
KILLS_AT_ONCE = 10
"""Backends killed one after the other, as one interruption."""
_BETWEEN_SECONDS = 0.05
_BACKENDS = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'gpubroker%'"


class Batch(Struct, frozen=True):
    seed: int
    restarts: int
    kills: int
    window_seconds: float = 3.0
    """The rate is taken over this time, before an interruption and after the recovery time."""
    recovery_seconds: float = 5.0
    """The service has this time to recover, from when PostgreSQL accepts connections again."""


class Interruption(Struct, frozen=True):
    began_at: float
    ended_at: float


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--restarts", type=int, default=10, help="restarts per batch")
    parser.add_argument("--kills", type=int, default=100, help="backends killed per batch, ten at a time")
    parser.add_argument("--window-seconds", type=float, default=3.0, help="over which a rate is taken")
    parser.add_argument("--recovery-seconds", type=float, default=5.0, help="time to recover")
    add_seeds(parser)


def command(options: argparse.Namespace) -> None:
    evidence = Evidence("postgres-restart", SUMMED, trials=("restarts", "backends_killed", "acknowledged"))
    how = options.restarts, options.kills, options.window_seconds, options.recovery_seconds
    run_seeds(options, evidence, lambda seed: run(Batch(seed, *how)), **on_database("postgres"))


def run(batch: Batch) -> dict[str, Any]:
    """The record of this batch; `wrong` lists what is wrong, in words."""
    with tempfile.TemporaryDirectory(prefix="gpb-chaos-") as place, a_server_of_its_own() as server:
        migrate(server.url, "head")
        deployment = Deployment(Path(place), server.url)
        answers = deployment.folder / "answers"
        load = Load(deployment.data_dirs, answers, deployment.kind(), f"{batch.seed}", CLIENTS / PER_SECOND)
        chance = Random(f"{batch.seed}/postgres-restart")
        try:
            deployment.start()
            interruptions = asyncio.run(_interrupt(batch, load, server, chance))
            deployment.drain()
        finally:
            deployment.stop()
        verdict = judge(server.url, deployment.folder, load.contradictions, DEVICE_MB)
        return {
            "seed": batch.seed,
            "restarts": batch.restarts,
            "backends_killed": batch.kills,
            **verdict.counts("acknowledged", "lost", "accepted_twice", "double_leased_mb"),
            **verdict.counts("leases_left", "events"),
            **_rates(batch, interruptions, sorted(line["at"] for line in lines_of(answers))),
            "wrong": verdict.wrong,
        }


async def _interrupt(batch: Batch, load: Load, server: OwnServer, chance: Random) -> list[Interruption]:
    kills_at_once = [min(KILLS_AT_ONCE, batch.kills - n) for n in range(0, batch.kills, KILLS_AT_ONCE)]
    order = chance.sample([0] * batch.restarts + kills_at_once, batch.restarts + len(kills_at_once))
    submitting = asyncio.create_task(load.submit(sys.maxsize))
    await load.reaches(int(PER_SECOND))
    interruptions = []
    for kills in order:
        await asyncio.sleep(batch.window_seconds)
        began_at = time.time()
        await asyncio.to_thread(_kill_backends if kills else _restart, server, kills, chance)
        interruptions.append(Interruption(began_at, time.time()))
        await asyncio.sleep(batch.recovery_seconds + batch.window_seconds)
    submitting.cancel()
    with suppress(asyncio.CancelledError):
        await submitting
    return interruptions


def _restart(server: OwnServer, *_: Any) -> None:
    server.stop("immediate")
    server.start()


def _kill_backends(server: OwnServer, kills: int, chance: Random) -> None:
    with psycopg.connect(server.url, autocommit=True) as connection:
        done = 0
        while done < kills:
            pids = [pid for (pid,) in connection.execute(_BACKENDS)]
            if pids:
                connection.execute("SELECT pg_terminate_backend(%s)", [chance.choice(pids)])
                done += 1
            time.sleep(_BETWEEN_SECONDS)


def _rates(batch: Batch, interruptions: Sequence[Interruption], answers: Sequence[float]) -> dict[str, Any]:
    def rate(begin: float) -> float:
        until = begin + batch.window_seconds
        return (bisect_left(answers, until) - bisect_left(answers, begin)) / batch.window_seconds

    before = [rate(each.began_at - batch.window_seconds) for each in interruptions]
    after = [rate(each.ended_at + batch.recovery_seconds) for each in interruptions]
    shares = sorted(late / (early or PER_SECOND) for early, late in zip(before, after, strict=True))
    gaps = sorted(answers[bisect_left(answers, each.ended_at)] - each.ended_at for each in interruptions)
    return {
        "interruptions": len(interruptions),
        "recovered": sum(share >= 0.95 for share in shares),
        "offered_per_second": PER_SECOND,
        "per_second_before": _quantiles(before),
        "share_of_it_after": _quantiles(shares),
        "seconds_to_the_next_answer": _quantiles(gaps),
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ranked = sorted(values)
    at = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}
    return {name: round(ranked[round(share * (len(ranked) - 1))], 3) for name, share in at.items()}
