"""Whether tasks are picked up as soon as ever while somebody reads the database in one long transaction.

What such a reader might still see cannot be cleaned away: dead rows pile up on PostgreSQL, and the log of
SQLite grows. Tasks come at random moments, run and end. For a third of the time nobody reads; then a
transaction that has read the tasks stays open until the end. The longest waits (99 of 100) of the last third
are compared with those of the first. On PostgreSQL each table that is updated often says which share of its
updates stayed on their page (HOT), reader and all.
"""

import sqlite3
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import psycopg

from bench.measuring import Figure, percentile, say
from bench.pace import Pace
from bench.pickup import WARM_UP_SECONDS, roomy, targets_of, waits_ms
from bench.sites import Site, add_variants, prefix_of, variants_of

UPDATES = """SELECT relname, n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables
WHERE n_tup_upd >= %s ORDER BY relname"""
OFTEN = 100
DEAD = "SELECT coalesce(sum(n_dead_tup), 0) FROM pg_stat_user_tables"


def add_options(parser: ArgumentParser) -> None:
    add_variants(parser)
    parser.add_argument("--seconds", type=float, default=180.0, help="for which tasks come, per variant")
    parser.add_argument("--per-second", type=float, default=100.0, help="tasks that come, on average")


def measure(options: Namespace) -> Iterator[Figure]:
    for variant in variants_of(options):
        with roomy(variant) as running, Pace() as pace:
            yield soak(running, variant, pace, options)
            if variant != "sqlite":
                yield from hot_updates(running, variant)


def soak(running: Site, variant: str, pace: Pace, options: Namespace) -> Figure:
    send = partial(pace.send, targets_of(running), per_second=options.per_second, status=202)
    third = options.seconds / 3
    known = send(seconds=WARM_UP_SECONDS)
    before = send(seconds=third)
    with a_reader(running.database):
        between = send(seconds=third)
        last = send(seconds=third)
        waits = waits_ms(running.database, known + before + between + last)
        say(f"  {variant}: {left_behind(running.database)} while the reader stays")
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


def hot_updates(running: Site, variant: str) -> Iterator[Figure]:
    with psycopg.connect(running.database) as server:
        for table, updates, hot in server.execute(UPDATES, [OFTEN]).fetchall():
            name = f"{prefix_of('soak', variant)}.hot.{table}"
            yield Figure("soak", name, hot / updates, "", updates, running.durability)


@contextmanager
def a_reader(database: str) -> Iterator[None]:
    """A transaction that sees the tasks as they are now, for as long as the block."""
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
