"""The victims are the cheapest there are, and none too many."""

from itertools import chain, combinations
from typing import Any

from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.places import Places
from gpubroker_server.core.planning.preemption.eviction import Eviction
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import NOW, Holding, a_device, a_node, a_task, a_world, holding
from tests.core.naive import Naive
from tests.core.plans import eviction_for

POLICY = Policy()

runs = st.fixed_dictionaries(
    {
        "mb": st.integers(1, 40),
        "priority": st.sampled_from((10, 40, 50, 60, 80)),
        "seconds": st.integers(0, 50),
        "cpu": st.sampled_from((0.0, 1.0)),
        "device": st.integers(0, 2),
    }
)


def a_run(number: int, device: str, run: dict[str, Any]) -> Holding:
    task = a_task(f"r{number:02}", priority=run["priority"], gpu_mb=run["mb"], cpu=run["cpu"])
    return holding(task, device, started_at=Instant(NOW - run["seconds"]))


def fitting(runs: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """As many of these runs, in order, as a device of this size can hold."""
    kept: list[dict[str, Any]] = []
    for run in runs:
        if sum(other["mb"] for other in kept) + run["mb"] <= size:
            kept.append(run)
    return kept


@given(st.lists(runs, max_size=8), st.integers(1, 100))
def test_on_one_device_no_other_choice_of_victims_costs_less(runs: list[dict[str, Any]], need: int) -> None:
    held = fitting(runs, 100)
    world = a_world(a_device(mb=100), *(a_run(n, "gpu0", run) for n, run in enumerate(held)))
    task = a_task("high", priority=60, gpu_mb=need)
    eviction = eviction_for(Draft(world), task)
    free = 100 - sum(run["mb"] for run in held)
    lower = [run for run in held if run["priority"] < 60]
    subsets = chain.from_iterable(combinations(lower, count) for count in range(len(lower) + 1))
    costs = [
        (sum(run["seconds"] for run in gone), len(gone))
        for gone in subsets
        if free + sum(run["mb"] for run in gone) >= need
    ]
    if free >= need or not costs:
        assert eviction is None
    else:
        assert eviction is not None
        lost = sum(NOW - victim.started_at for victim in eviction.victims if victim.started_at)
        assert (lost, len(eviction.victims)) == min(costs)


@given(
    st.lists(runs, min_size=6, max_size=24),
    st.integers(1, 3),
    st.integers(10, 100),
    st.sampled_from((0.0, 3.0)),
)
def test_every_victim_is_of_lower_priority_and_is_needed(
    runs: list[dict[str, Any]], gpus: int, need: int, cpu: float
) -> None:
    parts: list[Any] = [a_node(cpu=12.0)]
    for number in range(3):
        parts.append(a_device(f"gpu{number}", mb=100))
        held = fitting([run for run in runs if run["device"] == number], 100)
        parts += (a_run(100 * number + n, f"gpu{number}", run) for n, run in enumerate(held))
    world = a_world(*parts)
    task = a_task("high", priority=60, gpus=gpus, gpu_mb=need, cpu=cpu)
    eviction = eviction_for(Draft(world), task)
    naive = Naive(world, POLICY, NOW)
    if eviction is None:
        lower = naive.possible_victims(naive.nodes[0], task)
        fits = Places(Draft(world), POLICY, NOW).best(task) is not None
        assert fits or not can_be_cleared(naive, task, gpus, lower)
        return
    assert all(victim.priority < 60 for victim in eviction.victims)
    assert is_cleared(naive, task, eviction, eviction.victims)
    for victim in eviction.victims:
        others = tuple(other for other in eviction.victims if other is not victim)
        assert not is_cleared(naive, task, eviction, others)


def can_be_cleared(naive: Naive, task: Task, gpus: int, gone: list[Task]) -> bool:
    node = naive.nodes[0]
    return any(
        naive.would_fit(node, devices, task, gone) for devices in combinations(naive.devices(node.name), gpus)
    )


def is_cleared(naive: Naive, task: Task, eviction: Eviction, gone: tuple[Task, ...]) -> bool:
    """Whether the task would fit on the chosen devices once these have left."""
    keys = {device for device, _ in eviction.devices}
    devices = [device for device in naive.devices(eviction.node) if device.key in keys]
    return naive.would_fit(naive.nodes[0], devices, task, gone)
