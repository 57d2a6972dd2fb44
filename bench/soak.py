"""Time from commit to dispatch while another client keeps a read transaction open.

A long read transaction prevents clean-up: PostgreSQL keeps dead rows, and SQLite's write-ahead log grows.
Tasks arrive at random moments, run and end. In the first third of the time there is no reader; then a
transaction that has read the tasks stays open until the end. The p99 wait of the last third is compared with
that of the first. On PostgreSQL the share of HOT updates (on their own page) is reported for each table that
is updated often.
"""

import sqlite3
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import psycopg

from bench.deployment import Deployment, add_variants, prefix_of, variants_of
from bench.load import OpenLoop
from bench.measuring import Figure, percentile, report
from bench.pickup import WARM_UP_SECONDS, roomy_deployment, targets_of, waits_ms

UPDATES = """SELECT relname, n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables
WHERE n_tup_upd >= %s ORDER BY relname"""
OFTEN = 100
DEAD = "SELECT coalesce(sum(n_dead_tup), 0) FROM pg_stat_user_tables"


def add_options(parser: ArgumentParser) -> None:
    add_variants(parser)
    parser.add_argument(
        "--seconds", type=float, default=180.0, help="duration of the measurement per variant"
    )
    parser.add_argument("--per-second", type=float, default=100.0, help="arrivals on average")


def measure(options: Namespace) -> Iterator[Figure]:
    for variant in variants_of(options):
        with roomy_deployment(variant) as running, OpenLoop() as load:
            yield soak(running, variant, load, options)
            if variant != "sqlite":
                yield from hot_updates(running, variant)


def soak(running: Deployment, variant: str, load: OpenLoop, options: Namespace) -> Figure:
    send = partial(load.send, targets_of(running), per_second=options.per_second, status=202)
    third = options.seconds / 3
    known = send(seconds=WARM_UP_SECONDS)
    before = send(seconds=third)
    with a_reader(running.database):
        between = send(seconds=third)
        last = send(seconds=third)
        waits = waits_ms(running.database, known + before + between + last)
        report(f"  {variant}: {left_behind(running.database)} while the reader is there")
    quiet, read = percentile(waits[known : known + before], 99), percentile(waits[-last:], 99)
    return Figure(
        bench="soak",
        figure=f"{prefix_of('soak', variant)}.p99_ms",
        value=read,
        unit="ms",
        n=last,
        durability=running.durability,
        baseline=quiet,
        ratio=read / quiet,
    )


def hot_updates(running: Deployment, variant: str) -> Iterator[Figure]:
    with psycopg.connect(running.database) as server:
        for table, updates, hot in server.execute(UPDATES, [OFTEN]).fetchall():
            name = f"{prefix_of('soak', variant)}.hot.{table}"
            yield Figure("soak", name, hot / updates, "", updates, running.durability)


@contextmanager
def a_reader(database: str) -> Iterator[None]:
    """Keep a transaction that has read the tasks open during the with-block."""
    if database.startswith("postgresql:"):
        with psycopg.connect(database) as server:
            server.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            server.execute("SELECT count(*) FROM task").fetchall()
            yield
        return
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, isolation_level=None)) as file:
        file.execute("BEGIN")
        file.execute("SELECT count(*) FROM task").fetchall()
        yield


def left_behind(database: str) -> str:
    if database.startswith("postgresql:"):
        with psycopg.connect(database) as server:
            return f"{server.execute(DEAD).fetchall()[0][0]:,} dead rows"
    return f"{Path(f'{database}-wal').stat().st_size / 2**20:,.0f} MiB of log"
