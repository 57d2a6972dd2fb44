"""Tasks accepted durably per second in batches, compared with a plain COPY of the same rows.

Each POST /tasks/batch carries 1,000 tasks with different arguments; rows and events are on disk before the
answer, and the leader plans a queue that does not fit on its one device. On PostgreSQL the rows of a round
are then copied again with COPY, from prepared text, with the same indexes and as many rows per commit, on
one connection. On SQLite the baseline is `executemany` with the same rows.
"""

import json
import sqlite3
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import psycopg
from gpubroker_server.adapters.sql.store import migrate

from bench.accept import full_deployment, must_be_queued
from bench.deployment import Deployment, add_variants, variants_of
from bench.http import Target
from bench.load import ClosedLoop
from bench.measuring import Figure, Pair, compared, report

TABLES = {"task": "id", "task_spec": "task", "event": "position"}
"""The tables with one row per task -> the column that orders their rows by insertion."""


def add_options(parser: ArgumentParser) -> None:
    add_variants(parser)
    parser.add_argument("--connections", type=int, default=4, help="keep-alive connections")
    parser.add_argument("--tasks", type=int, default=1000, help="tasks per batch")
    parser.add_argument("--rounds", type=int, default=5, help="rounds to measure")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of load per round")


def measure(options: Namespace) -> Iterator[Figure]:
    for variant in variants_of(options):
        with full_deployment(variant) as running:
            is_file = variant == "sqlite"
            plain = PlainSqlite(Path(running.database)) if is_file else PlainCopy(running.database)
            yield rounds(running, plain, variant, options)


def rounds(running: Deployment, plain: "PlainCopy | PlainSqlite", name: str, options: Namespace) -> Figure:
    body = a_batch(options.tasks)
    targets = [
        Target(gateway.port, "POST", "/tasks/batch", gateway.headers, body) for gateway in running.gateways
    ]
    pairs: list[Pair] = []
    accepted = 0
    with ClosedLoop() as load:
        for number in range(options.rounds + 1):  # the first round is the warm-up
            posted = load.measure(*targets, connections=options.connections, seconds=options.seconds)
            count = options.tasks * len(posted.must_all_be(207).latencies_ms)
            running.wait_until_idle()
            copied = plain.per_second(count, options.tasks)
            pair = Pair(count / posted.seconds, copied)
            accepted += count
            if number:
                pairs.append(pair)
                report(
                    f"  {name} round {number}: {pair.ours_per_second:,.0f} tasks/s, "
                    f"plain {pair.baseline_per_second:,.0f}/s"
                )
    must_be_queued(running, accepted)
    return compared("batch", f"batch.{name}", "tasks/s", pairs, accepted, running.durability)


def a_batch(tasks: int) -> str:
    return json.dumps(
        {
            "tasks": [
                {
                    "run": {"entrypoint": "bench.tasks:noop", "kwargs": {"number": number}},
                    "resources": {"gpu_mb": 1024},
                }
                for number in range(tasks)
            ]
        }
    )


class PlainCopy:
    """Copies the last rows of a database into the same tables of another one on the same server."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._copy = url.replace("/postgres?", "/plain?")
        if self._copy == url:
            raise RuntimeError(f"the URL has to name the database postgres, not {url}")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE DATABASE plain")
        migrate(self._copy, "head")

    def per_second(self, tasks: int, per_commit: int) -> float:
        chunks = {table: list(self._chunks(table, tasks, per_commit)) for table in TABLES}
        with psycopg.connect(self._copy) as connection:
            connection.execute(f"TRUNCATE {', '.join(TABLES)}")
            connection.commit()
            began = time.perf_counter()
            for parts in zip(*chunks.values(), strict=True):
                for table, text in zip(chunks, parts, strict=True):
                    with connection.cursor() as cursor, cursor.copy(f"COPY {table} FROM STDIN") as copy:
                        copy.write(text)
                connection.commit()
            return tasks / (time.perf_counter() - began)

    def _chunks(self, table: str, tasks: int, per_commit: int) -> Iterator[bytes]:
        newest = f"SELECT * FROM {table} ORDER BY {TABLES[table]} DESC LIMIT {tasks}"
        lines: list[bytes] = []
        with psycopg.connect(self._url) as connection, connection.cursor() as cursor:
            ordered = f"COPY (SELECT * FROM ({newest}) n ORDER BY {TABLES[table]}) TO STDOUT"
            with cursor.copy(ordered) as copy:
                for piece in copy:
                    lines += bytes(piece).splitlines(keepends=True)
        for start in range(0, tasks, per_commit):
            yield b"".join(lines[start : start + per_commit])


class PlainSqlite:
    """Inserts the last rows of a file into the same tables of another file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._copy = path.with_name("plain.db")
        migrate(f"sqlite:///{self._copy}", "head")

    def per_second(self, tasks: int, per_commit: int) -> float:
        rows = {table: self._rows(table, tasks) for table in TABLES}
        with closing(sqlite3.connect(self._copy, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous = FULL")
            for table in TABLES:
                connection.execute(f"DELETE FROM {table}")
            began = time.perf_counter()
            for start in range(0, tasks, per_commit):
                connection.execute("BEGIN IMMEDIATE")
                for table, of_table in rows.items():
                    marks = ", ".join("?" * len(of_table[0]))
                    some = of_table[start : start + per_commit]
                    connection.executemany(f"INSERT INTO {table} VALUES ({marks})", some)
                connection.execute("COMMIT")
            return tasks / (time.perf_counter() - began)

    def _rows(self, table: str, tasks: int) -> Sequence[tuple[object, ...]]:
        newest = f"SELECT * FROM {table} ORDER BY {TABLES[table]} DESC LIMIT {tasks}"
        with closing(sqlite3.connect(f"file:{self._path}?mode=ro", uri=True)) as connection:
            return connection.execute(newest).fetchall()[::-1]
