"""How long a task waits between its commit and its dispatch, where there is room for it.

Tasks come at random moments, one by one. The wait begins when the submit's transaction takes its place in
the log, shortly before it is on disk; it ends when the order to start has left the leader and has reached
what carries out orders: the engine that runs nothing. In between lie the news of the submit, the plan, and
the commit of the admission. One process that does everything is measured apart from a gateway and a broker,
which meet in PostgreSQL alone. There the baseline is what a program without a queue would have to wait for:
one row inserted, committed and read, by a connection of its own, again and again while the tasks come.
"""

import json
import sqlite3
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from threading import Event
from typing import Any

import psycopg

from bench.http import Target
from bench.measuring import Figure, percentile, say
from bench.pace import Pace
from bench.sites import Site, add_variants, prefix_of, site, variants_of

TASK = {"run": {"entrypoint": "bench.tasks:noop"}, "resources": {"gpu_mb": 1024}}
ROOM_MB = 1_048_576
WARM_UP_SECONDS = 2.0
ROUND_SECONDS = 0.05
PATIENCE_SECONDS = 30.0

TASK_EVENTS = "SELECT at, kind, key, fields FROM event WHERE kind LIKE 'task.%' ORDER BY position"


LoggedEvent = tuple[float, str, str, str]
"""(at, kind, key, fields as JSON)"""


def add_options(parser: ArgumentParser) -> None:
    add_variants(parser)
    parser.add_argument("--per-second", type=float, default=50.0, help="tasks that come, on average")
    parser.add_argument("--seconds", type=float, default=30.0, help="for which they come")


def measure(options: Namespace) -> Iterator[Figure]:
    for variant in variants_of(options):
        with roomy(variant) as running, Pace() as pace:
            send = partial(pace.send, targets_of(running), per_second=options.per_second, status=202)
            known = send(seconds=WARM_UP_SECONDS)
            with plain_rounds(running.database) as rounds_ms:
                sent = send(seconds=options.seconds)
            waits = waits_ms(running.database, known + sent)[-sent:]
        yield from figures(variant, waits, rounds_ms, running.durability)


def figures(
    variant: str, waits: Sequence[float], rounds_ms: Sequence[float], durability: str
) -> Iterator[Figure]:
    say(f"  {variant}: the longest of {len(waits):,} waits was {max(waits):.1f} ms")
    for name, percent in (("p50", 50), ("p99", 99)):
        value = percentile(waits, percent)
        baseline = percentile(rounds_ms, percent) if rounds_ms else None
        yield Figure(
            "pickup",
            f"{prefix_of('pickup', variant)}.{name}_ms",
            value,
            "ms",
            len(waits),
            durability,
            baseline=baseline,
            ratio=None if baseline is None else value / baseline,
        )


@contextmanager
def plain_rounds(database: str) -> Iterator[Sequence[float]]:
    """Milliseconds of each, filled meanwhile; none on SQLite, where others may not write."""
    rounds_ms: list[float] = []
    if not database.startswith("postgresql:"):
        yield rounds_ms
        return
    is_over = Event()
    with psycopg.connect(database, autocommit=True) as server, ThreadPoolExecutor(1) as beside:
        server.execute("CREATE TABLE IF NOT EXISTS bench_round (n bigserial PRIMARY KEY, text text)")
        going = beside.submit(_go_round, server, is_over, rounds_ms)
        try:
            yield rounds_ms
        finally:
            is_over.set()
            going.result()


def _go_round(server: "psycopg.Connection[Any]", is_over: Event, rounds_ms: list[float]) -> None:
    while not is_over.wait(ROUND_SECONDS):
        began = time.perf_counter()
        with server.transaction():
            [(n,)] = server.execute("INSERT INTO bench_round (text) VALUES ('x') RETURNING n").fetchall()
        server.execute("SELECT text FROM bench_round WHERE n = %s", [n]).fetchall()
        rounds_ms.append(1000 * (time.perf_counter() - began))


@contextmanager
def roomy(variant: str) -> Iterator[Site]:
    """With room for everything, on the engine that runs nothing."""
    devices = json.dumps([{"memory_mb": ROOM_MB}])
    with site(variant, ENGINE="simulated", SIMULATED_DEVICES=devices, ENTRYPOINTS="bench.tasks:*") as running:
        yield running


def targets_of(running: Site) -> list[Target]:
    body = json.dumps(TASK)
    return [Target(door.port, "POST", "/tasks", door.headers, body) for door in running.doors]


def waits_ms(database: str, expected: int) -> list[float]:
    """Of all tasks in the log, in the order of their commits. Raises RuntimeError if one was not started."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(waits := list(waits_of(task_events(database)))) < expected:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{expected} tasks were accepted; {len(waits)} were started")
        time.sleep(0.2)
    return waits


def waits_of(events: Sequence[LoggedEvent]) -> Iterator[float]:
    """Milliseconds, of those that were started."""
    submitted: dict[str, float] = {}
    begun: dict[str, float] = {}
    for at, kind, key, fields in events:
        if kind == "task.submitted":
            submitted[key] = at
        elif key not in begun and (since := json.loads(fields).get("started_at")) is not None:
            begun[key] = since
    return (1000 * (begun[task] - at) for task, at in submitted.items() if task in begun)


def task_events(database: str) -> Sequence[LoggedEvent]:
    if database.startswith("postgresql:"):
        with psycopg.connect(database) as server:
            return server.execute(TASK_EVENTS).fetchall()
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as file:
        return file.execute(TASK_EVENTS).fetchall()
