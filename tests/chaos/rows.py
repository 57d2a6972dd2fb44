"""Held against each other: the rows of a database, and what its own log makes of them."""

import sqlite3
from collections.abc import Sequence
from typing import Any

import psycopg
from gpubroker_server.bootstrap.world_loading import fill
from gpubroker_server.core.domain.task import TERMINAL, TaskState
from gpubroker_server.core.domain.units import Position
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import TaskStore

from tests.chaos.history import History
from tests.contracts.scenes import picture

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
_LEFTOVERS = " UNION ALL ".join(
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


class Answers:
    """What a database says on a connection of its own, between transactions of others."""

    def __init__(self, url: str) -> None:
        self._connection: sqlite3.Connection | psycopg.Connection[Any]
        if url.startswith("sqlite:///"):
            self._connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
        else:
            self._connection = psycopg.connect(url, autocommit=True)

    def to(self, query: str) -> list[tuple[Any, ...]]:
        return self._connection.execute(query).fetchall()

    def close(self) -> None:
        self._connection.close()


async def picture_of(store: TaskStore) -> dict[str, Any]:
    """From the rows."""
    rows = World()
    fill(rows, await store.snapshot())
    return picture(rows)


class Rows:
    """Follows the log of one database; `check` compares all that is kept with what the log says."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._history = History()
        self._replayed = World()
        self.may_be_gone = False
        """What is over may have been taken out."""

    async def check(self, store: TaskStore, since: str = "") -> list[str]:
        """What is wrong, in words. Of what is in no picture, tasks from that id on are looked at."""
        events = await self._news(store)
        self._history.read(events)
        self._history.end()
        self._replayed.apply(events)
        told, stored = picture(self._replayed), await picture_of(store)
        wrong = list(self._history.violations)
        if told != stored:
            wrong += [f"rows and log differ in {part}" for part in told if told[part] != stored[part]]
        return [*wrong, *self._halves(since), *self._other_states(since)]

    def taken_out(self) -> set[str]:
        """Of the tasks that have ended, those that are no longer stored."""
        stored = {id for (id,) in self._answers.to("SELECT id FROM task")}
        return {id for id, task in self._history.tasks.items() if task.state in TERMINAL} - stored

    async def _news(self, store: TaskStore) -> Sequence[Event]:
        events: list[Event] = []
        while more := await store.events(Position(self._replayed.position + len(events)), 10_000):
            events += more
        return events

    def _halves(self, since: str) -> list[str]:
        """What should have been written together and was not, or not once."""
        questions = {
            "leased_mb is the sum of the leases": _LEDGER,
            "a task has what it runs": _WITHOUT_SPEC,
            "a task has its labels": _WITHOUT_LABEL,
            "nothing is left of a task that was taken out": _LEFTOVERS,
            "a success has one outcome, of the newest claim": _ENDS,
        }
        return [
            f"{rule}, but not here: {found}"
            for rule, query in questions.items()
            if (found := self._answers.to(query.format(since)))
        ]

    def _other_states(self, since: str) -> list[str]:
        """Tasks that have ended are in no picture: each row is compared with its last event."""
        stored = {
            id: (state, version, fence)
            for id, state, version, fence in self._answers.to(_TASKS.format(since))
        }
        seen = ((id, t) for id, t in self._history.tasks.items() if id >= since)
        told = {id: (t.state.value, t.version, t.fence) for id, t in seen}
        over = {id for id, (state, *_) in told.items() if TaskState(state) in TERMINAL}
        ids = sorted(stored.keys() | (told.keys() - (over if self.may_be_gone else set())))
        return [
            f"task {id} is {stored.get(id)} as stored and {told.get(id)} as told"
            for id in ids
            if stored.get(id) != told.get(id)
        ]
