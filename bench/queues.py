"""No-op jobs enqueued and drained per second, beside two Python queues on the same PostgreSQL.

One client enqueues the jobs a thousand at a time and waits for each answer; then they are drained.
Procrastinate and PgQueuer do both inside this process, by function calls, and mark a job as done in its row.
The service's tasks are submitted over HTTP, planned against the ledger, admitted, started on the simulated
engine, ended and released, each step with its events. All commits are on disk (`synchronous_commit=on`).
"""

import asyncio
import time
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import asyncpg
import procrastinate
import psycopg
from pgqueuer import PgQueuer
from pgqueuer.models import Job
from pgqueuer.types import QueueExecutionMode
from procrastinate.types import JSONDict

from bench.accept import FULL_SETTINGS, fill_device, must_be_queued
from bench.deployment import Storage, storage
from bench.measuring import Figure
from bench.pickup import task_events

PER_BATCH = 1000
IN_FLIGHT = 64
PATIENCE_SECONDS = 300.0


class Speeds(NamedTuple):
    enqueue_per_s: float
    drain_per_s: float


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=20_000, help="jobs per queue")


def measure(options: Namespace) -> Iterator[Figure]:
    jobs = options.jobs - options.jobs % PER_BATCH
    with storage("postgres") as place:
        found = {
            "procrastinate": asyncio.run(procrastinate_speeds(_database(place, "procrastinate"), jobs)),
            "pgqueuer": asyncio.run(pgqueuer_speeds(_database(place, "pgqueuer"), jobs)),
            "gpubroker": our_speeds(place, jobs),
        }
        for name, speeds in found.items():
            for what, value in speeds._asdict().items():
                yield Figure("queues", f"queues.{name}.{what}", value, "jobs/s", jobs, place.durability)


def _database(place: Storage, name: str) -> str:
    """Create a database on the same server and return its URL."""
    with psycopg.connect(place.database, autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name}")
    return place.database.replace("/postgres?", f"/{name}?")


async def procrastinate_speeds(url: str, jobs: int) -> Speeds:
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url))

    @app.task(name="noop")
    async def noop(number: int) -> None:
        """Do nothing, since the overhead is what is measured."""

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        began = time.perf_counter()
        for start in range(0, jobs, PER_BATCH):
            some: list[JSONDict] = [{"number": number} for number in range(start, start + PER_BATCH)]
            await noop.batch_defer_async(*some)
        enqueued = time.perf_counter()
        await app.run_worker_async(concurrency=IN_FLIGHT, wait=False, install_signal_handlers=False)
        drained = time.perf_counter()
    with psycopg.connect(url) as server:
        rows = server.execute("SELECT count(*) FROM procrastinate_jobs WHERE status = 'succeeded'").fetchall()
    _check_all_done("procrastinate", rows[0][0], jobs)
    return Speeds(jobs / (enqueued - began), jobs / (drained - enqueued))


async def pgqueuer_speeds(url: str, jobs: int) -> Speeds:
    done = 0
    async with _asyncpg(url) as connection:
        queue = PgQueuer.from_asyncpg_connection(connection)
        await queue.qm.queries.install()

        @queue.entrypoint("noop")
        async def noop(_job: Job) -> None:
            nonlocal done
            done += 1

        began = time.perf_counter()
        for start in range(0, jobs, PER_BATCH):
            payloads: list[bytes | None] = [b"%d" % number for number in range(start, start + PER_BATCH)]
            await queue.qm.queries.enqueue(["noop"] * PER_BATCH, payloads, [0] * PER_BATCH)
        enqueued = time.perf_counter()
        await queue.run(batch_size=IN_FLIGHT, mode=QueueExecutionMode.drain)
        drained = time.perf_counter()
    _check_all_done("pgqueuer", done, jobs)
    return Speeds(jobs / (enqueued - began), jobs / (drained - enqueued))


@asynccontextmanager
async def _asyncpg(url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


def our_speeds(place: Storage, jobs: int) -> Speeds:
    job = {"run": {"entrypoint": "bench.tasks:noop"}, "priority": 10, "resources": {"gpu_mb": 96}}
    with place.started(**FULL_SETTINGS) as running:
        holder = fill_device(running)
        gateway = running.gateways[0]
        began = time.perf_counter()
        for _ in range(0, jobs, PER_BATCH):
            gateway.ask("POST", "/tasks/batch", {"tasks": [job] * PER_BATCH})
        enqueued = time.perf_counter()
        must_be_queued(running, jobs)
        gateway.ask("POST", f"/tasks/{holder}/cancel", {"grace_seconds": 0})
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (done := gateway.ask("GET", "/stats")["tasks"]["succeeded"]) < jobs:
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)
        _check_all_done("gpubroker", done, jobs)
        ends = [
            at
            for at, kind, _, _ in task_events(place.database)
            if kind in ("task.cancelled", "task.succeeded")
        ]
    return Speeds(jobs / (enqueued - began), jobs / (ends[-1] - ends[0]))


def _check_all_done(name: str, done: int, jobs: int) -> None:
    if done != jobs:
        raise RuntimeError(f"{name} had to run {jobs} jobs and ran {done}")
