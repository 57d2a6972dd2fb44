"""Whatever people ask for and whatever breaks, in any order: what must hold at every step and in the end."""

from typing import Any

import pytest
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.holders import External
from gpubroker_server.core.domain.orders import Ending
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import ACTIVE, Dependency, OnFailure, Task, TaskState
from gpubroker_server.core.domain.units import Instant, Seconds, TaskId
from gpubroker_server.core.world.world import World
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from tests.builders import NOW, a_demand, a_device, a_node, a_task, a_world
from tests.core.scenarios import POLICY, SHAPES
from tests.simulation.agents import Agent, Process
from tests.simulation.ground import Ground

BEAT_SECONDS = 4.0
DRAIN_TURNS = 400
PRIORITIES = (5, 20, 50, 60, 80, 95)
LIMITS: tuple[dict[str, float], ...] = (
    *({},) * 3,
    *({"expected_seconds": 60.0},) * 3,
    {"timeout_seconds": 20.0},
    {"queue_ttl_seconds": 15.0},
    {"deadline_at": 40.0},
    {"not_before": 10.0},
)
ELASTIC: dict[str, Any] = {"bundles": (a_demand(gpu_mb=20),) * 3, "min_ranks": 1}
POOL = (("pool:small:gpus", 1.0),)
"""One of the pool's two GPUs, for each rank, and for the one that the gang needs."""
POOLED: dict[str, Any] = {"bundles": (a_demand(gpu_mb=20, slots=POOL),) * 3, "min_ranks": 1, "slots": POOL}
GANGS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"bundles": (a_demand(gpu_mb=20),) * 2},
    {"bundles": (a_demand(gpu_mb=30, cpu=1.0),) * 3, "strategy": "spread"},
    {"bundles": (a_demand(gpus=1), a_demand(cpu=1.0)), "strategy": "strict_pack"},
    {"bundles": (a_demand(gpu_mb=10),) * 2, "strategy": "strict_spread"},
    ELASTIC,
    POOLED,
)
"""What some tasks of a course with gangs ask for instead of their shape."""
DEMAND_FIELDS = frozenset(Demand.__struct_fields__)
PICKS = st.integers(0, 9)
ENDINGS = {"succeed": Ending.SUCCEEDED, "fail": Ending.FAILED, "get lost": Ending.LOST}
ACTS = (
    "begin",
    "begin",
    "get ready",
    "get ready",
    "save",
    "vanish",
    "vanish",
    "give way",
    "give way",
    "stick",
    "crash",
    *ENDINGS,
)
NEEDS_PRIORITY = 50
"""Of tasks that ask for a seat; below, they would wait for ever."""


@st.composite
def fleets(draw: st.DrawFn) -> World:
    """One to three nodes of one or two small devices."""
    parts: list[Any] = []
    for number in range(1, draw(st.integers(1, 3)) + 1):
        node = f"n{number}"
        parts.append(
            a_node(
                node,
                cpu=draw(st.sampled_from((2.0, 4.0))),
                memory_mb=100,
                max_runs=draw(st.sampled_from((3, 6))),
                incarnation=f"{node}-1",
                custom=(("fpga", 2.0),),
            )
        )
        parts += [
            a_device(f"gpu{index}", node, mb=draw(st.sampled_from((40, 80))))
            for index in range(draw(st.integers(1, 2)))
        ]
    return a_world(*parts)


@st.composite
def submissions(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a task, times counted from now."""
    return {
        **draw(st.sampled_from(SHAPES)),
        **draw(st.sampled_from(LIMITS)),
        "gang": draw(st.sampled_from(GANGS)),
        "tenant": draw(st.sampled_from(("default", "default", "acme", "beta", "solo"))),
        "priority": draw(st.sampled_from(PRIORITIES)),
        "grace_seconds": draw(st.sampled_from((0.0, 5.0, 30.0))),
        "max_retries": draw(st.integers(0, 2)),
        "preemptions": draw(st.sampled_from((0, 0, 1))),
    }


dependencies = st.lists(st.tuples(st.integers(0, 5), st.sampled_from(OnFailure)), max_size=2)
"""(how many submits ago, what its failure does)"""


class Course(RuleBasedStateMachine):
    """Rules are what people, runs and machines do, a few at a time; with time the leader has its turns."""

    gangs = False
    policy = POLICY

    @initialize(world=fleets(), first=st.lists(submissions(), min_size=2, max_size=5))
    def begin_with(self, world: World, first: list[dict[str, Any]]) -> None:
        self.ground = Ground(world, self.policy, NOW)
        self.count = 0
        for fields in first:
            self._submit(fields)
        self._turn(0.0)

    @rule(several=st.lists(submissions(), min_size=1, max_size=3))
    def people_submit(self, several: list[dict[str, Any]]) -> None:
        for fields in several:
            self._submit(fields)

    @rule(fields=submissions(), after=dependencies)
    def somebody_submits_what_runs_after_others(
        self, fields: dict[str, Any], after: list[tuple[int, OnFailure]]
    ) -> None:
        known = self.ground.submitted
        awaited = {known[-1 - ago % len(known)]: on_failure for ago, on_failure in after if known}
        self._submit(fields, tuple(Dependency(TaskId(id), how) for id, how in sorted(awaited.items())))

    @rule(
        pick=PICKS,
        wish=st.sampled_from(("cancel", "cancel now", "hold", "renew", "release", *PRIORITIES)),
    )
    def somebody_changes_his_mind(self, pick: int, wish: str | int) -> None:
        ground = self.ground
        match wish:
            case "hold":
                if task := self._task(pick, TaskState.PENDING):
                    ground.ask(task, "change", held=not task.held)
            case "renew" | "release":
                if outsiders := self._outsiders():
                    ground.ask(outsiders[pick % len(outsiders)], wish)
            case str():
                if task := self._task(pick, TaskState.PENDING, *ACTIVE):
                    ground.ask(task, "cancel", grace_seconds=0.0 if wish == "cancel now" else None)
            case int():
                task = self._task(pick, TaskState.PENDING, *ACTIVE)
                if task and ("seat" not in dict(task.demand.custom) or wish >= NEEDS_PRIORITY):
                    ground.ask(task, "change", priority=wish)

    @rule(
        gpu_mb=st.sampled_from((10, 20, 40)),
        ttl=st.sampled_from((20.0, 90.0)),
        priority=st.sampled_from(PRIORITIES),
    )
    def somebody_asks_for_memory_alone(self, gpu_mb: int, ttl: float, priority: int) -> None:
        """Who is not started by the broker, and says himself when he has left."""
        terms = {"holder": External(Seconds(ttl)), "deadline_at": ttl, "grace_seconds": Seconds(5.0)}
        self._submit({"gpu_mb": gpu_mb, "priority": priority, "gang": {}, **terms})

    @rule(acts=st.lists(st.tuples(st.sampled_from(ACTS), PICKS), min_size=1, max_size=6))
    def runs_go_on(self, acts: list[tuple[str, int]]) -> None:
        for act, pick in acts:
            found = [(agent, process) for agent, process in self.ground.processes() if can(process, act)]
            if found:
                self._act(act, *found[pick % len(found)])

    @rule(pick=PICKS, what=st.sampled_from(("cut", "agent", "power", "back", "back", "leader", "orders")))
    def something_breaks(self, pick: int, what: str) -> None:
        agents = list(self.ground.agents.values())
        agent = agents[pick % len(agents)]
        match what:
            case "back":
                self.ground.find(agent)
            case "leader":
                self.ground.change_leader()
            case "orders":
                self.ground.orders_get_lost = True
            case _:
                self.ground.lose(agent, what)

    @rule(turns=st.sampled_from((1, 1, 2, 4, 12)))
    def time_passes(self, turns: int) -> None:
        for _ in range(turns):
            self._turn(BEAT_SECONDS)

    @rule()
    def the_leader_sleeps(self) -> None:
        self._turn(90.0)

    def teardown(self) -> None:
        """People go home and everything works again: then every task that was accepted comes to its end."""
        if not hasattr(self, "ground"):
            return
        ground = self.ground
        for agent in ground.agents.values():
            ground.find(agent)
        for task in list(ground.world.tasks.values()):
            if task.held and not task.is_terminal:
                ground.ask(task, "change", held=False)
        for _ in range(DRAIN_TURNS):
            for task in self._outsiders():
                ground.ask(task, "release")
            if len(ground.ends) == len(ground.submitted) and not ground.world.tasks:
                break
            for agent, process in ground.processes():
                self._bring_to_its_end(agent, process)
            self._turn(BEAT_SECONDS)
        left = sorted(set(ground.submitted) - ground.ends.keys())
        assert not left, f"these never ended: {[ground.world.tasks[TaskId(name)] for name in left]}"
        assert not ground.world.leases
        assert not ground.world.pledges

    def _bring_to_its_end(self, agent: Agent, process: Process) -> None:
        process.is_stuck = False
        for act in ("begin", "give way", "get ready", "succeed", "vanish"):
            if can(process, act):
                self._act(act, agent, process)
                return

    def _submit(self, fields: dict[str, Any], after: tuple[Dependency, ...] = ()) -> None:
        now = Instant(self.ground.now)
        self.count += 1
        gang = fields.pop("gang")
        if self.gangs and gang:
            fields = {name: value for name, value in fields.items() if name not in DEMAND_FIELDS} | gang
        ahead: dict[str, Any] = {
            name: now + fields[name] for name in ("not_before", "deadline_at") if name in fields
        }
        task = a_task(f"t{self.count:02}", **{**fields, **ahead}, submitted_at=now, after=after)
        if after:
            task = replace(task, awaits=True)
        elif task.queue_ttl_seconds is not None:
            task = replace(task, expires_at=Instant(now + task.queue_ttl_seconds))
        self.ground.submit(task)

    def _act(self, act: str, agent: Agent, process: Process) -> None:
        match act:
            case "begin":
                self.ground.begin(agent, process)
            case "get ready":
                self.ground.get_ready(agent, process)
            case "save":
                self.ground.save(agent, process)
            case "stick":
                process.is_stuck = True
            case "vanish" | "crash":
                self.ground.vanish(agent, process)
            case "give way":
                self.ground.end(agent, process, Ending.STOPPED)
                self.ground.vanish(agent, process)
            case _:
                self.ground.end(agent, process, ENDINGS[act])

    def _turn(self, seconds: float) -> None:
        self.ground.now += seconds
        self.ground.turn()
        self.ground.after_turn()

    def _outsiders(self) -> list[Task]:
        """External holders with memory, also those that should have left."""
        tasks = self.ground.world.tasks
        return [
            tasks[name]
            for name in sorted(tasks)
            if isinstance(tasks[name].holder, External) and tasks[name].fence
        ]

    def _task(self, pick: int, *states: TaskState) -> Task | None:
        found = sorted(name for name, task in self.ground.world.tasks.items() if task.state in states)
        return self.ground.world.tasks[found[pick % len(found)]] if found else None


def can(process: Process, act: str) -> bool:
    """Whether this may become of a process now."""
    match act:
        case "begin":
            return not process.has_begun
        case "get ready":
            waits = process.has_begun and process.order.barrier
            return waits and not (process.is_ready or process.has_ended)
        case "succeed" | "save":
            return process.goes and not process.has_ended
        case "vanish":
            return process.has_ended
        case "give way":
            return process.stop_at is not None and not process.has_ended
        case "stick":
            return not process.is_stuck
        case _:
            return process.has_begun and not process.has_ended


class CourseWithGangs(Course):
    """The same with tasks of several ranks among them."""

    gangs = True
    policy = replace(POLICY, backfill_depth=64)
    """How many gangs were kept away is not compared, so nothing may depend on it."""

    @rule(needs_mb=st.sampled_from((20, 40)), priority=st.sampled_from((50, 90)))
    def an_elastic_gang_gets_to_work_and_somebody_needs_room(self, needs_mb: int, priority: int) -> None:
        self._submit({"gang": ELASTIC, "priority": 10, "grace_seconds": Seconds(5.0)})
        self._turn(BEAT_SECONDS)
        for act in ("begin", "get ready"):
            for agent, process in self.ground.processes():
                if can(process, act):
                    self._act(act, agent, process)
        self._turn(BEAT_SECONDS)
        self._submit({"gang": {}, "gpu_mb": needs_mb, "priority": priority})
        self._turn(BEAT_SECONDS)


@pytest.mark.hypothesis
@pytest.mark.parametrize(("course", "examples"), [(Course, 50), (CourseWithGangs, 30)])
def test_any_course_of_events_keeps_every_rule_and_every_task_ends(
    course: type[Course], examples: int
) -> None:
    run_state_machine_as_test(course, settings=settings(max_examples=examples, stateful_step_count=30))


@pytest.mark.evidence
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("course", [Course, CourseWithGangs])
def test_many_long_courses_keep_every_rule_and_every_task_ends(course: type[Course]) -> None:
    every = settings(max_examples=2000, stateful_step_count=100, derandomize=False)
    run_state_machine_as_test(course, settings=every)


def test_a_task_that_ends_before_a_forecast_passes_one_that_does_not() -> None:
    """Of two that ask for the same, the more urgent could not be stopped for the one that is to start."""
    ground = Ground(a_world(a_device(mb=80)), Policy(), NOW)
    ground.submit(a_task("runs", gpu_mb=60, priority=65, expected_seconds=100.0))
    ground.turn()
    [(agent, process)] = ground.processes()
    ground.begin(agent, process)
    ground.submit(a_task("waits", gpu_mb=80, priority=60))
    ground.submit(a_task("stays", gpu_mb=20, priority=60, submitted_at=Instant(NOW + 1.0)))
    ground.submit(a_task("gives way", gpu_mb=20, priority=50, submitted_at=Instant(NOW + 1.0)))
    ground.now += 2.0
    ground.turn()
    active = {task.id for task in ground.world.tasks.values() if task.is_active}
    assert active == {"runs", "gives way"}
