"""What people submit in a day, drawn from a seed: every band, every shape of demand and of program."""

from random import Random
from typing import Any

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.orders import Ending
from gpubroker_server.core.domain.task import Dependency, OnFailure, Task
from gpubroker_server.core.domain.units import Instant, Mib, Seconds, TaskId
from msgspec import Struct
from msgspec.structs import replace

from tests.simulation.machine import Program

GIB = 1024
PRIORITIES = (3, 25, 25, 50, 50, 50, 60, 75, 80, 95)
MEAN_PAUSE_SECONDS = 45.0


class Arrival(Struct, frozen=True):
    task: Task
    program: Program
    requests: tuple[tuple[float, str, dict[str, Any]], ...]
    """(seconds after submit, what, fields)"""


class Workload:
    def __init__(self, chance: Random, hurry: float = 1.0) -> None:
        """Everything takes so many times less long."""
        self._chance = chance
        self._hurry = hurry
        self._count = 0
        self.accepted: list[tuple[TaskId, str]] = []
        """(task, tenant) of what was submitted, oldest first."""

    def pause_seconds(self) -> float:
        return self._chance.expovariate(1 / MEAN_PAUSE_SECONDS)

    def arrival(self, now: Instant) -> Arrival:
        self._count += 1
        chance = self._chance
        program = self._program()
        task = Task(
            id=TaskId(f"t{self._count:05}"),
            tenant=chance.choice(("red", "blue")),
            name=f"task {self._count}",
            priority=chance.choice(PRIORITIES),
            demand=self._demand(),
            submitted_at=now,
            max_retries=chance.randint(0, 3),
            timeout_seconds=self._seconds(300.0, 3600.0) if chance.random() < 0.2 else None,
            grace_seconds=Seconds(chance.choice((0.0, 5.0, 30.0, 120.0)) / self._hurry),
            not_before=self._at(now, 0.1, 1200.0),
            queue_ttl_seconds=self._seconds(60.0, 1800.0) if chance.random() < 0.1 else None,
            deadline_at=self._at(now, 0.1, 7200.0),
        )
        task = self._with_dependencies(task)
        return Arrival(task, program, self._requests(task))

    def _with_dependencies(self, task: Task) -> Task:
        """Every sixth one runs after some of its tenant's latest, which may have ended long ago."""
        chance = self._chance
        mine = [name for name, tenant in self.accepted[-200:] if tenant == task.tenant]
        if chance.random() > 1 / 6 or not mine:
            ttl = task.queue_ttl_seconds
            earliest = max(task.submitted_at, task.not_before or task.submitted_at)
            return replace(task, expires_at=None if ttl is None else Instant(earliest + ttl))
        names = {
            mine[-min(len(mine), 1 + int(chance.expovariate(1 / 8)))] for _ in range(chance.randint(1, 3))
        }
        on_failure = (OnFailure.FAIL, OnFailure.FAIL, OnFailure.IGNORE)
        after = tuple(Dependency(name, chance.choice(on_failure)) for name in sorted(names))
        return replace(task, after=after, awaits=True)

    def _seconds(self, least: float, most: float) -> Seconds:
        return Seconds(self._chance.uniform(least, most) / self._hurry)

    def _at(self, now: Instant, share: float, most_seconds: float) -> Instant | None:
        """A time ahead, for that share of the tasks."""
        at = self._seconds(1.0, most_seconds)
        return Instant(now + at) if self._chance.random() < share else None

    def _demand(self) -> Demand:
        chance = self._chance
        cpu, memory_mb = chance.choice((0.5, 1.0, 2.0, 4.0)), Mib(chance.randint(1, 8) * GIB)
        shapes: list[tuple[int, dict[str, Any]]] = [
            (50, {"gpus": 1, "gpu_mb": Mib(chance.randint(2, 60) * GIB)}),
            (10, {"gpus": 1, "gpu_fraction": chance.choice((0.25, 0.5, 1.0))}),
            (5, {"gpus": 1}),
            (5, {"gpus": 1, "gpu_mb": Mib(10 * GIB), "exclusive": True}),
            (6, {"gpus": 2, "gpu_mb": Mib(chance.randint(10, 70) * GIB)}),
            (2, {"gpus": chance.choice((2, 4))}),
            (7, {"custom": (("licence", 1.0),)}),
            (15, {}),
            (1, {"gpus": 1, "gpu_mb": Mib(90 * GIB)}),
        ]
        (shape,) = chance.choices([fields for _, fields in shapes], [weight for weight, _ in shapes])
        return Demand(cpu=cpu, memory_mb=memory_mb, placement=chance.choice(("pack", "spread")), **shape)

    def _program(self) -> Program:
        chance = self._chance
        fails = chance.random() < 0.12
        return Program(
            work_seconds=min(2 * 3600.0, chance.expovariate(1 / 600.0)) / self._hurry,
            bad_end=chance.choice((Ending.FAILED, Ending.LOST)),
            bad_attempts=chance.randint(1, 3) if fails else 0,
            saves_every_seconds=self._seconds(20.0, 300.0) if chance.random() < 0.6 else None,
            heeds_notice=chance.random() < 0.85,
            leaves_after_seconds=chance.uniform(0.0, 2.0)
            if chance.random() < 0.95
            else chance.uniform(30.0, 200.0) / self._hurry**0.5,
        )

    def _requests(self, task: Task) -> tuple[tuple[float, str, dict[str, Any]], ...]:
        chance = self._chance
        after = chance.expovariate(1 / 300.0) / self._hurry
        kind = chance.random()
        if kind < 0.05:
            return ((after, "cancel", {}),)
        if kind < 0.07:
            return ((after, "cancel", {}), (after + 3.0 / self._hurry, "cancel", {"grace_seconds": 0}))
        if kind < 0.12:
            return ((after, "change", {"priority": chance.choice(PRIORITIES)}),)
        if kind < 0.16:
            return (
                (after, "change", {"held": True}),
                (after + 600.0 / self._hurry, "change", {"held": False}),
            )
        return ()
