"""What only a database can promise: rows outlive the process, and what cannot be written harms nothing."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from gpubroker_server.adapters.sql.store import open_store
from gpubroker_server.adapters.sql.writer import Work, Writer
from gpubroker_server.core.domain.decisions import AuditNote, Decision
from gpubroker_server.core.domain.lease import Proof, quarantine
from gpubroker_server.core.domain.lease import release as give_back
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Instant, Position, TaskId
from gpubroker_server.ports.store import (
    CommitVerdict,
    StoreUnavailable,
    SubmitVerdict,
    TokenRow,
    Unstorable,
)
from msgspec.structs import replace
from sqlalchemy import create_engine, text

from tests.builders import NOW, a_task
from tests.contracts.scenes import (
    a_checkpoint,
    a_new_lease,
    a_submission,
    admission,
    claimed,
    end,
    log_of,
    next_term,
    opened,
    with_gpu,
)
from tests.full_disk import file_size_limit
from tests.patience import PATIENCE_SECONDS


async def test_everything_is_there_after_a_restart(url: str) -> None:
    first, second = a_task("t1"), a_task("t2")
    async with opened(url) as store:
        term = await with_gpu(store, first, second)
        await store.commit(term, [admission(first), admission(second), end(claimed(second))])
        await store.commit(term, [a_checkpoint(claimed(first), 1)])
        await store.put_token(TokenRow("ci", "lab", ("*",), 100, sha256="hash", created_at=NOW), by="admin")
        before, log = await store.snapshot(), await log_of(store)
    async with opened(url) as store:
        after = await store.snapshot()
        assert await log_of(store) == log
        assert (after.position, after.tasks, after.leases) == (before.position, before.tasks, before.leases)
        assert after.finished == {("default", TaskState.SUCCEEDED): 1}
        assert [token.name for token in await store.tokens()] == ["ci"]
        assert len(await store.checkpoints(first.id)) == 1
        assert await next_term(store, "next") == term + 1
        await store.submit(a_submission("t3"))
        assert await store.head() == before.position + 1


async def test_a_closed_store_refuses_writes(url: str) -> None:
    store = await open_store(url)
    await store.close()
    with pytest.raises(StoreUnavailable):
        await store.submit(a_submission("t1"))


class ClosedMeanwhile(SimpleQueue[Sequence[Work] | None]):
    """The queue of a writer that is closed right before it gets its first works."""

    def __init__(self, writer: Writer) -> None:
        self._writer: Writer | None = writer

    def put(self, item: Sequence[Work] | None, block: bool = True, timeout: float | None = None) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        super().put(item, block, timeout)


async def test_write_that_is_queued_behind_the_close_is_refused(url: str) -> None:
    store = await open_store(url)
    inbox, store._writer._inbox = store._writer._inbox, ClosedMeanwhile(store._writer)
    inbox.put([])  # The thread waits there, and goes on to the other queue.
    with pytest.raises(StoreUnavailable, match="the store is closed"):
        await asyncio.wait_for(store.submit(a_submission("t1")), PATIENCE_SECONDS)
    await store.close()


async def test_calls_after_the_close_are_refused_as_unavailable(url: str) -> None:
    store = await open_store(url)
    await store.close()
    with pytest.raises(StoreUnavailable, match="the store is closed"):
        await store.record(TaskId("t1"))
    with pytest.raises(StoreUnavailable, match="the store is closed"):
        await next_term(store, "late")


async def test_close_writes_what_was_waiting(url: str) -> None:
    store = await open_store(url)
    waiting = [asyncio.create_task(store.submit(a_submission(f"t{n}"))) for n in range(20)]
    await asyncio.sleep(0)
    await store.close()
    assert {(await task).verdict for task in waiting} == {SubmitVerdict.ACCEPTED}
    async with opened(url) as store:
        assert await store.head() == 20


async def test_what_cannot_be_stored_fails_alone(url: str) -> None:
    async with opened(url) as store:
        bad = a_submission(a_task("bad", name="half a pair: \ud800"))
        good = [store.submit(a_submission(f"t{n}")) for n in range(3)]
        outcomes: list[Any] = await asyncio.gather(*good, store.submit(bad), return_exceptions=True)
        assert isinstance(outcomes[-1], Unstorable)
        assert [outcome.verdict for outcome in outcomes[:3]] == [SubmitVerdict.ACCEPTED] * 3
        assert await store.head() == 3


async def test_what_postgresql_alone_refuses_fails_alone(postgres_url: str) -> None:
    async with opened(postgres_url) as store:
        bad = a_submission(a_task("bad", name="nul: \0"))
        good = [store.submit(a_submission(f"t{n}")) for n in range(3)]
        outcomes: list[Any] = await asyncio.gather(*good, store.submit(bad), return_exceptions=True)
        assert isinstance(outcomes[-1], Unstorable)
        assert await store.head() == 3


SUBMITTER = """
import asyncio, sys
from gpubroker_server.adapters.sql.postgres import PostgresSession
from gpubroker_server.adapters.sql.session import CommitUnknown
from gpubroker_server.adapters.sql.store import open_store
from tests.contracts.scenes import a_submission

async def submit_for_ever(url):
    store = await open_store(url)
    async def client(name):
        for n in range(100_000):
            await store.submit(a_submission(f"{name}-{n:06}", key=f"{name}-{n}"))
            print(f"{name}-{n:06}", flush=True)
    await asyncio.gather(*(client(f"c{c}") for c in range(8)))

asyncio.run(submit_for_ever(sys.argv[1]))
"""


def acknowledged_before_the_kill(url: str, enough: int) -> list[str]:
    """Start a process that submits, kill it with SIGKILL in the middle; the tasks it was told of."""
    process = subprocess.Popen([sys.executable, "-c", SUBMITTER, url], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    told = [process.stdout.readline().strip() for _ in range(enough)]
    os.kill(process.pid, signal.SIGKILL)
    rest = process.stdout.read().splitlines(keepends=True)
    process.wait()
    return told + [line.strip() for line in rest if line.endswith("\n")]


async def test_nothing_acknowledged_is_lost_when_the_process_is_killed(url: str) -> None:
    told = await asyncio.to_thread(acknowledged_before_the_kill, url, 200)
    async with opened(url) as store:
        log = await log_of(store)
        assert {event.key for event in log} >= set(told)
        assert [event.position for event in log] == list(range(1, len(log) + 1))
        specs = await store.specs([TaskId(event.key) for event in log])
        assert len(specs) == len(log)


async def test_the_audit_log_names_the_actor(url: str) -> None:
    async with opened(url) as store:
        await next_term(store, "host:1")
        token = TokenRow("ci", "lab", ("*",), 100, sha256="hash", created_at=NOW)
        assert await store.put_token(token, by="alice")
        assert not await store.put_token(replace(token, sha256="other"), by="mallory")
        assert await store.drop_token("ci", by="bob")
        assert not await store.drop_token("ci", by="mallory")
        await store.audit(by="carol", tenant="default", action="shutdown", subject="service")
    query = text("SELECT actor, action, subject, tenant FROM audit ORDER BY id")
    with create_engine(url.replace("postgresql:", "postgresql+psycopg:")).connect() as connection:
        assert [tuple(row) for row in connection.execute(query)] == [
            ("host:1", "term.taken", "1", ""),
            ("alice", "token.put", "ci", "lab"),
            ("bob", "token.dropped", "ci", "lab"),
            ("carol", "shutdown", "service", "default"),
        ]


async def test_what_a_decision_notes_is_written_with_it_or_not_at_all(url: str) -> None:
    task = a_task("t1")
    stuck = quarantine(a_new_lease(claimed(task)), Instant(NOW + 7.0))
    note = AuditNote(NOW, "lab", "olga", "quarantine.release", stuck.key, "powered off")
    async with opened(url) as store:
        term = await with_gpu(store, task)
        await store.commit(term, [admission(task), Decision(task.id, "unconfirmed", leases=(stuck,))])
        assert (await store.snapshot()).leases == [stuck], "with the time since when"
        stated = Decision(task.id, "attest", leases=(give_back(stuck, Proof.STATEMENT),), audit=(note,))
        assert await store.commit(term, [stated]) == [CommitVerdict.COMMITTED]
        assert CommitVerdict.COMMITTED not in await store.commit(term, [stated])
        [*_, last] = await store.events(Position(0), 100)
        assert (last.kind, last.fields["proof"]) == ("lease.released", "statement")
    query = text("SELECT at, tenant, actor, action, subject, reason FROM audit WHERE action <> 'term.taken'")
    with create_engine(url.replace("postgresql:", "postgresql+psycopg:")).connect() as connection:
        assert [AuditNote(*row) for row in connection.execute(query)] == [note]


async def test_every_row_of_a_task_names_its_tenant(url: str) -> None:
    task = a_task("t1", tenant="lab")
    async with opened(url) as store:
        term = await with_gpu(store)
        await store.submit(a_submission(task, labels={"team": "vision"}))
        await store.commit(term, [admission(task), a_checkpoint(claimed(task), 1)])
        saved = replace(claimed(task), version=3)
        await store.commit(term, [end(saved)])
    tables = ("task", "task_spec", "task_label", "lease", "checkpoint", "outcome")
    query = text(" UNION ALL ".join(f"SELECT '{name}', tenant FROM {name}" for name in tables))
    with create_engine(url.replace("postgresql:", "postgresql+psycopg:")).connect() as connection:
        assert {tuple(row) for row in connection.execute(query)} == {(name, "lab") for name in tables}


async def test_a_full_disk_is_reported_and_harms_nothing(tmp_path: Path) -> None:
    async with opened(f"sqlite:///{tmp_path / 'full.db'}") as store:
        await store.submit(a_submission("t1"))
        with file_size_limit(1_000_000):
            big = a_submission("t2", arguments=b"x" * 2_000_000)
            with pytest.raises(StoreUnavailable, match=r"full|I/O"):
                await store.submit(big)
        assert (await store.submit(a_submission("t3"))).verdict is SubmitVerdict.ACCEPTED
        assert [event.key for event in await log_of(store)] == ["t1", "t3"]


async def test_a_quiet_file_gives_the_space_of_its_log_back(tmp_path: Path) -> None:
    log = tmp_path / "gpubroker.db-wal"
    async with opened(f"sqlite:///{tmp_path / 'gpubroker.db'}") as store:
        await asyncio.gather(*(store.submit(a_submission(f"t{number}")) for number in range(50)))
        assert log.stat().st_size > 0
        for _ in range(400):
            if log.stat().st_size == 0:
                break
            await asyncio.sleep(0.05)
        assert log.stat().st_size == 0
        await store.submit(a_submission("after"))
        assert len((await store.snapshot()).tasks) == 51
