"""The worst moment for a leader to be stopped: between the commit of a start and its order, on real Ray."""

import asyncio
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import pytest

from service.adapters.sql.store import SqlStore, open_store
from service.core.events import Event
from service.core.task import Task, TaskState
from service.core.units import Position, TaskId
from service.ports import RunSpec, Submission
from tests.builders import GIB, a_task
from tests.chaos.history import violations
from tests.e2e.broker_process import BEFORE_SEND, LEAVE, NOTICES_NOTHING, BrokerProcess
from tests.e2e.service_process import ROOT, until

FIRST, SECOND = (f"00000000-0000-7000-8000-{n:012}" for n in (1, 2))

T = TypeVar("T")


class Database:
    """What is in it, asked by a process that takes no part."""

    def __init__(self, url: str) -> None:
        self._url = url

    def submit(self, id: str, witness: Path, flag: Path, **fields: Any) -> None:
        """A task that has the whole GPU, notes that it began, and ends once `flag` is there."""
        arguments = json.dumps({"args": [], "kwargs": {"witness": str(witness), "until": str(flag)}})
        spec = RunSpec("entrypoint", "tests.e2e.work:hold", arguments=arguments.encode())
        task = a_task(id, gpu_mb=20 * GIB, **fields)
        self._ask(lambda store: store.submit(Submission(task, spec)))

    def row(self, id: str) -> Task:
        record = self._ask(lambda store: store.record(TaskId(id)))
        assert record is not None
        return record.task

    def log(self) -> list[Event]:
        return list(self._ask(lambda store: store.events(Position(0), 10_000)))

    def term(self) -> tuple[int, str]:
        with psycopg.connect(self._url) as connection:
            row = connection.execute("SELECT term, holder FROM leadership").fetchone()
        assert row is not None
        return row

    def _ask(self, question: Callable[[SqlStore], Any]) -> Any:
        async def ask() -> Any:
            store = await open_store(self._url)
            try:
                return await question(store)
            finally:
                await store.close()

        return asyncio.run(ask())


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def test_a_start_that_a_stopped_leader_sends_when_it_wakes_is_refused_and_so_is_what_it_commits(
    tmp_path: Path, postgres_url: str, as_guest: str, processes: ExitStack
) -> None:
    """Its clock stood still and its driver heard nothing, so that only the agent and the row are left."""
    settings: dict[str, Any] = {
        "database_url": postgres_url,
        "ray": {"address": as_guest, "cluster": "paused", "spares": 1, "warm_runners": 0},
        "entrypoints": ["tests.e2e.work:*"],
        "task_path": [str(ROOT)],
        "simulated_devices": [{"kind": "sim-24g", "memory_mb": 24 * GIB, "count": 1}],
        "policy": {"sample_period_seconds": 0.5},
    }
    database = Database(postgres_url)
    witness, flag = tmp_path / "witness", tmp_path / "flag"
    old = processes.enter_context(BrokerProcess(tmp_path, "old", NOTICES_NOTHING, **settings))
    old.next("executor connected")
    new = processes.enter_context(BrokerProcess(tmp_path, "new", **settings))
    new.next("executor standby")

    old.order(BEFORE_SEND)
    database.submit(FIRST, witness, flag)
    stopped_at = old.next("stops")["at"]
    until(old.is_stopped, "the old leader has stopped itself")
    assert (database.row(FIRST).state, database.row(FIRST).fence) == (TaskState.ADMITTED, 1)

    database.submit(SECOND, witness, flag, priority=90)
    seconds = new.next("leads")["at"] - stopped_at
    print(f"the next one leads after {seconds:.2f} s")
    assert seconds <= 5.0
    until(lambda: lines_of(witness) == [f"{SECOND} 1"], "the device is at work for the second task")
    assert database.row(FIRST).state is TaskState.PENDING

    old.send(signal.SIGCONT)
    assert old.next("sent") | {"at": 0} == {"what": "sent", "at": 0, "task": FIRST, "fence": 1}
    refused = new.next("heard")
    assert (refused["task"], refused["fence"], refused["ending"]) == (FIRST, 1, "never_started")
    assert refused["at"] > stopped_at + seconds
    old.next("stands back")
    assert "is over: new:" in old.log()
    assert lines_of(witness) == [f"{SECOND} 1"]
    assert database.row(FIRST).state is TaskState.PENDING

    flag.touch()
    until(lambda: database.row(FIRST).state is TaskState.SUCCEEDED, "the first task has had its turn")
    assert lines_of(witness) == [f"{SECOND} 1", f"{FIRST} 2"]
    assert database.term()[0] == 2
    assert violations(database.log()) == []
    new.order(LEAVE)
    new.next("left")
