"""A database for a run, and the check that its rows agree with its event log."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from gpubroker_server.adapters.sql.store import migrate
from gpubroker_server.bootstrap.follower import fill
from gpubroker_server.core.domain.task import TERMINAL, TaskState
from gpubroker_server.core.domain.units import Position
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import TaskStore

from tests.chaos.history import History
from tests.contracts.scenes import picture
from tests.postgres import a_server_of_its_own

DURABILITY = {
    "sqlite": "journal_mode=WAL, synchronous=FULL",
    "postgres": "fsync=on, synchronous_commit=on",
}

_LEDGER = """
SELECT d.key, d.leased_mb, COALESCE(SUM(l.mb), 0) FROM device d
LEFT JOIN lease l ON l.device = d.key AND NOT l.released
GROUP BY d.key, d.leased_mb HAVING d.leased_mb <> COALESCE(SUM(l.mb), 0)
"""
_WITHOUT_SPEC = (
    "SELECT t.id FROM task t LEFT JOIN task_spec s ON s.task = t.id WHERE s.task IS NULL AND t.id >= '{}'"
)
_WITHOUT_LABEL = (
    "SELECT s.task FROM task_spec s LEFT JOIN task_label l ON l.task = s.task "
    "WHERE s.labels <> '{{}}' AND l.task IS NULL AND s.task >= '{}'"
)
_ENDS = (
    "SELECT t.id, t.fence, count(o.task) FROM task t "
    "LEFT JOIN outcome o ON o.task = t.id AND o.ending = 'succeeded' "
    "WHERE (t.state = 'succeeded' OR o.task IS NOT NULL) AND t.id >= '{}' GROUP BY t.id, t.fence, t.state "
    "HAVING count(o.task) <> 1 OR max(o.fence) <> t.fence OR t.state <> 'succeeded'"
)
_PRUNED = " UNION ALL ".join(
    f"SELECT o.{task} FROM {table} o LEFT JOIN task t ON t.id = o.{task} "
    f"WHERE t.id IS NULL AND o.{task} >= '{{0}}'{also}"
    for table, task, also in (
        ("task_spec", "task", ""),
        ("task_label", "task", ""),
        ("outcome", "task", ""),
        ("checkpoint", "task", ""),
        ("batch", "task", ""),
        ("lease", "holder", " AND o.holder_kind = 'run'"),
    )
)
_TASKS = "SELECT id, state, version, fence FROM task WHERE id >= '{}'"


@contextmanager
def a_database(name: str, folder: Path) -> Iterator[str]:
    """The URL of a new database with the current schema, as durable as in production."""
    if name == "sqlite":
        url = f"sqlite:///{folder / 'gpubroker.db'}"
        migrate(url, "head")
        yield url
        return
    with a_server_of_its_own() as server:
        migrate(server.url, "head")
        yield server.url


class Reader:
    """Reads a database on its own connection, one query per transaction."""

    def __init__(self, url: str) -> None:
        self._connection: sqlite3.Connection | psycopg.Connection[Any]
        if url.startswith("sqlite:///"):
            self._connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
        else:
            self._connection = psycopg.connect(url, autocommit=True)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return self._connection.execute(query).fetchall()

    def close(self) -> None:
        self._connection.close()


async def picture_of(store: TaskStore) -> dict[str, Any]:
    """The World that the rows describe, as plain values."""
    rows = World()
    fill(rows, await store.snapshot())
    return picture(rows)


class Checker:
    """Reads the event log of a database; `check` compares the rows with it."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._history = History()
        self._replayed = World()
        self.may_be_pruned = False
        """Whether rows of ended tasks may have been pruned."""

    async def check(self, store: TaskStore, since: str = "") -> list[str]:
        """The differences, in words. `since`: of ended tasks, only ids from this one on are checked."""
        events = await self._new_events(store)
        self._history.read(events)
        self._history.end()
        self._replayed.apply(events)
        logged, stored = picture(self._replayed), await picture_of(store)
        wrong = list(self._history.violations)
        if logged != stored:
            wrong += [f"rows and log differ in {part}" for part in logged if logged[part] != stored[part]]
        return [*wrong, *self._incomplete_rows(since), *self._other_states(since)]

    def pruned(self) -> set[str]:
        """The ended tasks that are no longer stored."""
        stored = {id for (id,) in self._reader.rows("SELECT id FROM task")}
        return {id for id, task in self._history.tasks.items() if task.state in TERMINAL} - stored

    async def _new_events(self, store: TaskStore) -> Sequence[Event]:
        events: list[Event] = []
        while more := await store.events(Position(self._replayed.position + len(events)), 10_000):
            events += more
        return events

    def _incomplete_rows(self, since: str) -> list[str]:
        """Rows that should have been written together, exactly once, and were not."""
        rules = {
            "leased_mb is the sum of the leases": _LEDGER,
            "a task has a spec": _WITHOUT_SPEC,
            "a task has its labels": _WITHOUT_LABEL,
            "a pruned task has no rows left": _PRUNED,
            "a success has one outcome, of the newest claim": _ENDS,
        }
        return [
            f"violated: {rule}; rows: {found}"
            for rule, query in rules.items()
            if (found := self._reader.rows(query.format(since)))
        ]

    def _other_states(self, since: str) -> list[str]:
        """Ended tasks are not part of a World, so each row is compared with its last event."""
        stored = {
            id: (state, version, fence)
            for id, state, version, fence in self._reader.rows(_TASKS.format(since))
        }
        tasks = ((id, t) for id, t in self._history.tasks.items() if id >= since)
        logged = {id: (t.state.value, t.version, t.fence) for id, t in tasks}
        ended = {id for id, (state, *_) in logged.items() if TaskState(state) in TERMINAL}
        ids = sorted(stored.keys() | (logged.keys() - (ended if self.may_be_pruned else set())))
        return [
            f"task {id} is stored as {stored.get(id)} and logged as {logged.get(id)}"
            for id in ids
            if stored.get(id) != logged.get(id)
        ]
