"""People who submit, ask again until they get an answer, and change their minds; answers are recorded."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from gpubroker_server.core.admission.feasibility import check
from gpubroker_server.core.domain.decisions import Request
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import AdmittedTask, BatchSubmission, RunSpec
from msgspec import Struct
from msgspec.structs import replace

from tests.simulation.line_to_database import Database
from tests.simulation.machine import Program
from tests.simulation.timeline import Timeline
from tests.simulation.workload import Workload
from tests.stores import at_once

HURRY = 400.0
KEYED = 0.5
"""Of the submits, so many carry a key, and may be sent again."""
LOST_ANSWER = 0.05


class Wish(Struct, frozen=True):
    """What somebody wants to have run, under a key by which it can be asked for again."""

    key: str | None
    tasks: tuple[Task, ...]


class People:
    def __init__(
        self,
        timeline: Timeline,
        database: Database,
        policy: Policy,
        nodes: int,
        chance: Random,
        workload: Random,
    ) -> None:
        """`nodes`: how many there are."""
        self.programs: dict[TaskId, Program] = {}
        self.told: set[TaskId] = set()
        """Every task with an answer that it is accepted."""
        self.contradictions: list[str] = []
        """Keys that were answered with two tasks."""
        self.is_at_home = False
        """Nobody asks for anything new."""
        self._timeline, self._database, self._policy, self._chance = timeline, database, policy, chance
        self._nodes = nodes
        self._workload = Workload(workload, HURRY)
        self._count = 0
        self._answers: dict[str, TaskId] = {}
        self._wishes: dict[str, Wish] = {}
        self.world = World()
        """What a gateway sees."""
        database.listen(self._on_events)

    def submit(self, tasks: int = 1) -> None:
        """One, or a batch."""
        chance = self._chance
        arrivals = [self._workload.arrival(self._database.now()) for _ in range(tasks)]
        if not all(self._fits(arrival.task) for arrival in arrivals):
            return
        self._count += 1
        key = f"key {self._count}" if tasks > 1 or chance.random() < KEYED else None
        wish = Wish(key, tuple(arrival.task for arrival in arrivals))
        if key is not None:
            self._wishes[key] = wish
        for arrival in arrivals:
            self.programs[arrival.task.id] = arrival.program
        self._later(lambda: self._send(wish, chance.randint(0, 3)))
        for arrival in arrivals:
            for seconds, what, fields in arrival.requests:
                self._timeline.after(seconds, self._asking(arrival.task, what, fields))

    def insist(self) -> None:
        """Somebody sends once more what was answered long ago."""
        if self._answers:
            self._send(self._anew(self._wishes[self._chance.choice(list(self._answers))]), 0)

    def change_a_mind(self) -> None:
        if self._workload.accepted:
            task, _ = self._chance.choice(self._workload.accepted[-20:])
            fields = {"priority": self._chance.choice((5, 50, 95))}
            what, fields = self._chance.choice((("cancel", {}), ("cancel", {}), ("change", fields)))
            self._ask(task, what, fields)

    def let_go(self) -> None:
        """A held task would never end."""
        for task in list(self.world.tasks.values()):
            if task.held:
                self._ask(task.id, "change", {"held": False})

    def _after_known(self, task: Task) -> Task:
        """A gateway refuses to let a task run after one that it does not know (any more), at each try."""
        after = tuple(it for it in task.after if at_once(self._database.record(it.task)) is not None)
        return replace(task, after=after, awaits=bool(after))

    def _fits(self, task: Task) -> bool:
        """As a gateway finds that knows all nodes; one that knows none would let everything pass."""
        if len(self.world.nodes) < self._nodes:
            return False
        devices = [ledger.device for ledger in self.world.ledgers.values()]
        return check(task.demand, devices, self.world.nodes.values(), self._policy) is None

    def _send(self, wish: Wish, tries: int) -> None:
        """Each try has ids of its own, as each call of a gateway has; the key says that it is the same."""
        again = wish if wish.key is None else self._anew(wish)
        if self._database.is_away:
            self._later(lambda: self._send(again, tries), 2.0)
            return
        answer = self._submit(wish)
        if wish.key is not None and tries > 0 and self._chance.random() < LOST_ANSWER * 4:
            self._later(lambda: self._send(again, tries - 1), 2.0)
            return
        if wish.key is None and self._chance.random() < LOST_ANSWER:
            return  # it may be stored, but was not answered
        first = wish.tasks[0].id
        before = first if wish.key is None else self._answers.setdefault(wish.key, answer)
        if before != answer:
            self.contradictions.append(f"{wish.key} is {before} and {answer}")
        self.told |= {task.id for task in wish.tasks} if answer == first else {answer}

    def _submit(self, wish: Wish) -> TaskId:
        submissions = [AdmittedTask(self._after_known(task), RunSpec("command")) for task in wish.tasks]
        if len(submissions) > 1:
            batch = BatchSubmission(submissions, wish.key, "body", "[]")
            outcome = at_once(self._database.submit_batch(batch))
        else:
            named = replace(submissions[0], idempotency_key=wish.key, body_hash="body")
            outcome = at_once(self._database.submit(named))
        if outcome.task == wish.tasks[0].id:
            self._workload.accepted += [(task.id, task.tenant) for task in wish.tasks]
        return outcome.task

    def _anew(self, wish: Wish) -> Wish:
        self._count += 1
        tasks = tuple(
            replace(task, id=TaskId(f"{task.id.partition('+')[0]}+{self._count}"), version=1)
            for task in wish.tasks
        )
        for old, new in zip(wish.tasks, tasks, strict=True):
            self.programs[new.id] = self.programs[old.id]
        return Wish(wish.key, tasks)

    def _asking(self, task: Task, what: str, fields: dict[str, Any]) -> Callable[[], None]:
        return lambda: None if self.is_at_home else self._ask(task.id, what, fields)

    def _ask(self, task: TaskId, what: str, fields: dict[str, Any]) -> None:
        """Of a task that there is, as a gateway finds."""
        if not self._database.is_away and at_once(self._database.record(task)) is not None:
            self._count += 1
            now = self._database.now()
            at_once(self._database.request(Request(f"r{self._count:05}", task, "red", what, fields, now)))

    def _later(self, act: Callable[[], None], most_seconds: float = 0.02) -> None:
        self._timeline.after(self._chance.uniform(0.0, most_seconds), act)

    def _on_events(self, events: Sequence[Event]) -> None:
        self.world.apply(self._database.plain[-len(events) :])
