"""Faults that other schedulers had in the field, each as a story that must end well here.

The docstrings name where each was reported, and what happened there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gpubroker_server.core.domain.decisions import Decision, Request
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import Ended, Ending, Failure, Gone, Report, Started
from gpubroker_server.core.domain.policy import Policy, TenantPolicy
from gpubroker_server.core.domain.task import TERMINAL, Task, TaskState
from gpubroker_server.core.domain.units import Instant, Mib, Seconds
from gpubroker_server.core.lifecycle.change_requests import carry_out
from gpubroker_server.core.lifecycle.deadlines import ObservationWindow, due, extend_window
from gpubroker_server.core.lifecycle.runs import apply_reports
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.forecasts.forecasts import make_forecasts
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from gpubroker_server.core.planning.plan_cache import PlanCache
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import (
    GIB,
    NOW,
    a_demand,
    a_device,
    a_task,
    a_world,
    check_ledger,
    commit,
    holding,
    key,
    submit,
)

POLICY = Policy()


@dataclass
class Leader:
    """What the leader does, turn by turn, and what it did."""

    world: World
    policy: Policy = POLICY
    now: float = NOW
    watch: ObservationWindow | None = None
    cache: PlanCache = field(default_factory=PlanCache)
    forecasts: Sequence[Forecast] = ()
    done: list[Decision] = field(default_factory=list)

    def turn(self, *reports: Report) -> None:
        """Hear, look at the clock, plan."""
        now = Instant(self.now)
        self._make_true(apply_reports(self.world, reports, now, self.policy))
        self._make_true(due(self.world, now, self.policy, self.watch))
        self.watch = extend_window(self.watch, now)
        *_, self.forecasts = make_forecasts(self.world, self.policy, now, self.forecasts)
        cursor = None
        while True:
            plan = plan_cycle(
                self.world, self.policy, now, cursor, cache=self.cache, forecasts=self.forecasts
            )
            self._make_true(plan.decisions)
            cursor = plan.cursor
            if cursor is None:
                return

    def wait(self, seconds: float, *, every: float = 1.0) -> None:
        """Turn after turn, with fresh samples."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + every)
            samples = (ledger.sample for ledger in self.world.ledgers.values())
            self.world.measure([replace(sample, at=Instant(self.now)) for sample in samples if sample])
            self.turn()

    def leaves(self, name: str) -> None:
        """Its process is confirmed gone."""
        self.turn(Gone(self.task(name).id, self.task(name).fence, Instant(self.now), Proof.PROCESS_ABSENT))

    def ends(self, name: str, ending: Ending = Ending.SUCCEEDED) -> None:
        task, now = self.task(name), Instant(self.now)
        failure = Failure("exception", "as written") if ending is Ending.FAILED else None
        self.turn(
            Ended(task.id, task.fence, now, ending, failure=failure),
            Gone(task.id, task.fence, now, Proof.PROCESS_ABSENT),
        )

    def task(self, name: str) -> Task:
        return next(task for task in self.world.tasks.values() if task.id == name)

    def state(self, name: str) -> TaskState:
        return self.task(name).state

    def admitted(self) -> list[str]:
        return [decision.subject for decision in self.done if decision.why == "admit"]

    def notices(self) -> list[str]:
        return [w.task.id for d in self.done if d.why == "preempt" for w in d.tasks]

    def _make_true(self, decisions: Any) -> None:
        for decision in decisions:
            commit(self.world, decision, self.now)
            self.done.append(decision)
            check_ledger(self.world)


def test_victims_that_leave_one_by_one_are_not_let_back_into_their_room() -> None:
    """kubernetes-sigs/kueue#13662: the first victim to be gone was admitted again while its preemptor still
    waited for the second, was preempted again, and so on for ever."""
    victims = [holding(a_task(name, priority=10, gpu_mb=40 * GIB), "gpu0") for name in ("a", "b")]
    leader = Leader(a_world(a_device(), *victims, a_task("high", priority=80, gpu_mb=80 * GIB)))
    leader.turn()
    leader.leaves("a")
    leader.wait(10.0)
    assert leader.state("a") is TaskState.PENDING
    leader.leaves("b")
    leader.wait(10.0)
    assert leader.state("high") is TaskState.ADMITTED
    assert leader.notices() == ["a", "b"]
    assert leader.admitted() == ["high"]


def test_borrowers_that_leave_one_by_one_do_not_retake_reclaimed_memory() -> None:
    """This is kueue#13662 where the victims are of a higher priority than the owner of what they had
    borrowed: it is below its guarantee, and their priority gives them no right to the hole."""
    policy = Policy(tenants=(TenantPolicy("owner", "lab", Mib(50)), TenantPolicy("guest", "lab", Mib(30))))
    began = {"a": 5.0, "b": 10.0, "c": 900.0, "d": 900.0}
    runs = [
        holding(a_task(name, tenant="guest", gpu_mb=20), "gpu0", started_at=Instant(NOW - seconds))
        for name, seconds in began.items()
    ]
    wants = a_task("wants", tenant="owner", gpu_mb=35, priority=45)
    leader = Leader(a_world(a_device(mb=80), *runs, wants), policy)
    leader.turn()
    leader.leaves("a")
    leader.wait(10.0)
    assert leader.state("a") is TaskState.PENDING
    leader.leaves("b")
    leader.wait(10.0)
    assert leader.notices() == ["a", "b"]
    assert leader.admitted() == ["wants"]


def test_who_waited_longest_for_room_is_the_first_to_get_it() -> None:
    """dstackai/dstack#4246: a run that found no room slept longer after each attempt, up to 10 minutes, so
    that fresh runs of lower priority took what became free."""
    leader = Leader(a_world(a_device(), holding(a_task("runs", priority=80, gpu_mb=80 * GIB), "gpu0")))
    submit(leader.world, a_task("waits", priority=60, gpu_mb=80 * GIB))
    leader.wait(900.0, every=5.0)
    fresh = Instant(leader.now)
    submit(leader.world, a_task("fresh", priority=50, gpu_mb=80 * GIB, submitted_at=fresh))
    submit(leader.world, a_task("equal", priority=60, gpu_mb=80 * GIB, submitted_at=fresh))
    leader.ends("runs")
    assert leader.admitted() == ["waits"]


def test_an_attempt_that_failed_keeps_its_place_in_the_queue() -> None:
    """dstackai/dstack#4246, the other half: the pause after a failure must not cost the place, once it is
    over."""
    first = holding(a_task("first", gpu_mb=80 * GIB, max_retries=3), "gpu0")
    leader = Leader(a_world(a_device(), first))
    submit(leader.world, a_task("second", gpu_mb=80 * GIB, submitted_at=Instant(NOW + 1.0)))
    submit(leader.world, a_task("third", gpu_mb=80 * GIB, submitted_at=Instant(NOW + 2.0)))
    leader.now += 5.0
    leader.ends("first", Ending.FAILED)
    leader.wait(5.0)
    leader.ends("second")
    assert leader.admitted() == ["second", "first"]


def test_parts_of_devices_are_no_device() -> None:
    """ray-project/ray#52133: 80 actors of 0.18 GPU on two nodes of 8 hung, because what was left on each of a
    node's GPUs was added up, and a sixth actor sent where none of them had room."""
    devices = [a_device(f"gpu{i}", node) for node in ("n1", "n2") for i in range(8)]
    tasks = [a_task(f"t{i:02}", gpu_fraction=0.18) for i in range(81)]
    leader = Leader(a_world(*devices, *tasks))
    leader.turn()
    assert [len(ledger.holdings) for ledger in leader.world.ledgers.values()] == [5] * 16
    free_mb = sum(ledger.free_mb() for ledger in leader.world.ledgers.values())
    assert free_mb > 1.5 * 80 * GIB
    assert leader.state("t80") is TaskState.PENDING


def test_a_victim_is_not_brought_back_by_what_still_arrives_for_it() -> None:
    """ollama/ollama#17408: a request for a runner that was being evicted gave it a new life, and whoever
    waited for its memory waited for ever."""
    victim = holding(a_task("low", priority=10, gpu_mb=80 * GIB), "gpu0", state=TaskState.ADMITTED)
    leader = Leader(a_world(a_device(), victim, a_task("high", priority=80, gpu_mb=80 * GIB)))
    leader.turn()
    leader.turn(Started(victim.task.id, victim.task.fence, Instant(leader.now), pid=1))
    changes: tuple[dict[str, Any], ...] = ({"priority": 80}, {"held": True}, {"held": False})
    for number, change in enumerate(changes):
        request = Request(f"r{number}", victim.task.id, "default", "change", change, Instant(leader.now))
        commit(leader.world, carry_out(leader.world, request, Instant(leader.now), Policy()))
    leader.wait(5.0)
    assert (leader.state("low"), leader.task("low").freeing_for) == (TaskState.STOPPING, "high")
    leader.leaves("low")
    assert leader.admitted() == ["high"]


def test_nobody_waits_for_ever_for_a_victim_that_does_not_leave() -> None:
    """ollama/ollama#17408: nothing ended the wait for an unload that was never going to happen."""
    low = a_task("low", priority=10, gpu_mb=80 * GIB, grace_seconds=Seconds(30.0))
    other = a_task("other", priority=10, gpu_mb=80 * GIB, grace_seconds=Seconds(30.0))
    world = a_world(
        a_device(),
        a_device("gpu1"),
        holding(low, "gpu0"),
        holding(other, "gpu1", started_at=Instant(NOW - 200.0)),
        a_task("high", priority=80, gpu_mb=80 * GIB),
    )
    leader = Leader(world)
    leader.wait(45.0)
    assert leader.notices() == ["low", "other"]
    leader.leaves("other")
    assert leader.admitted() == ["high"]
    assert world.ledgers[key("gpu0")].free_mb() == 0


def test_nobody_is_stopped_for_what_would_still_not_fit() -> None:
    """ollama/ollama#18282: a model that could not fit had the others evicted for it, again and again."""
    stays = holding(a_task("stays", priority=90, gpu_mb=50 * GIB), "gpu0")
    lows = [holding(a_task(f"low{i}", priority=10, gpu_mb=10 * GIB), "gpu0") for i in range(3)]
    leader = Leader(a_world(a_device(), stays, *lows, a_task("high", priority=80, gpu_mb=31 * GIB)))
    leader.wait(600.0, every=5.0)
    assert leader.done == []
    leader.ends("stays")
    leader.turn()
    assert leader.admitted() == ["high"]
    assert leader.notices() == []
    assert not [task for task in leader.world.tasks.values() if task.state in TERMINAL]


def test_two_gangs_never_hold_half_each() -> None:
    """kubeflow/trainer#165: workers were placed one by one, so that each of two jobs got a part of the GPUs,
    and both waited for the rest for ever."""
    devices = [a_device(f"gpu{i}", node) for node in ("n1", "n2") for i in range(2)]
    gangs = [a_task(name, bundles=(a_demand(gpu_mb=80 * GIB),) * 3) for name in ("first", "second")]
    leader = Leader(a_world(*devices, *gangs))
    leader.wait(60.0)
    assert leader.admitted() == ["first"]
    assert len(leader.world.leases_of(leader.task("first"))) == 3
    assert leader.world.leases_of(leader.task("second")) == []


def test_a_large_task_is_not_starved_by_small_ones() -> None:
    """kubernetes-retired/kube-batch#158: who needs many devices at once and just waits for them sees each one
    go, as it becomes free, to somebody small who came later."""
    small = {"gpus": 1, "expected_seconds": Seconds(100.0)}
    runs = [
        holding(a_task(f"run{i}", **small), f"gpu{i}", mb=80 * GIB, started_at=Instant(NOW - 50.0 * i))
        for i in range(2)
    ]
    leader = Leader(a_world(a_device(), a_device("gpu1"), *runs))
    submit(leader.world, a_task("large", gpus=2, expected_seconds=Seconds(100.0)))
    for number in range(60):
        now = Instant(leader.now)
        submit(leader.world, a_task(f"small{number:02}", **small, submitted_at=now))
        for task in [leader.world.tasks[name] for name in sorted(leader.world.active)]:
            began = task.started_at or task.admitted_at
            if began is not None and leader.now - began >= 100.0:
                leader.ends(task.id)
        leader.wait(10.0, every=5.0)
        if "large" in leader.admitted():
            break
    assert "large" in leader.admitted()
    assert leader.now - NOW <= 150.0
