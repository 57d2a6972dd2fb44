"""What a task may ask for and what it then gets, on real Ray, as its user sees it."""

from typing import Any

import pytest
from gpubroker import Refused

from tests.e2e.hands import BIG, PATIENCE_SECONDS, SMALL, Hands
from tests.e2e.service_process import GIB, until


def test_a_custom_resource_is_given_up_to_its_limit_and_to_whom_it_is_for(hands: Hands) -> None:
    licence = {"cpu": 0.1, "custom": {"licence": 1}}
    first, second = hands.at_work("first", **licence), hands.at_work("second", **licence)
    third = hands.waiting("third", "ConcurrencyLimited", **licence)
    with pytest.raises(Refused, match="licence"):
        hands.hold("poor", priority=39, **licence)
    hands.end(first, second, third)


def test_a_pool_says_where_and_how_much_of_all_together(hands: Hands) -> None:
    [device] = hands.at_work("fast", pool="fast", gpu_mb=4096).devices
    assert device.uuid == next(gpu.uuid for gpu in hands.broker.gpus() if gpu.kind == "sim-big")
    assert hands.broker.get(hands.at_work("there", pool="fast", gpu_mb=4096)).node == "n2"
    narrow = hands.at_work("narrow", pool="narrow", gpu_mb=8000)
    behind = hands.waiting("behind", "ConcurrencyLimited", pool="narrow", gpu_mb=8000)
    hands.end(narrow, behind)


def test_a_pool_without_fractions_gives_whole_gpus_only(hands: Hands) -> None:
    task = hands.at_work("task", pool="whole", gpus=1)
    assert [device.gpu_mb for device in task.devices] == [24 * GIB]
    with pytest.raises(Refused, match="whole"):
        hands.hold("half", pool="whole", gpu_fraction=0.5)
    hands.end(task)


@pytest.mark.parametrize(
    "most",
    [
        {"cpu": 2},
        {"cpu": 0.1, "gpus": 1},
        {"cpu": 0.1, "memory_mb": 2000},
        {"cpu": 0.1, "custom": {"scratch_gb": 10}},
    ],
    ids=["CPU", "GPUs", "host memory", "storage"],
)
def test_what_a_pool_has_is_shared_and_goes_to_critical_tasks_first(
    hands: Hands, most: dict[str, Any]
) -> None:
    first = hands.at_work("first", pool="shared", grace_seconds=1, **most)
    second = hands.waiting("second", "ConcurrencyLimited", pool="shared", **most)
    hands.end(hands.at_work("critical", pool="shared", priority=95, **most))
    first, second = hands.end(first, second)
    assert (first.preemptions, second.preemptions) == (1, 0)


def test_a_profile_says_what_a_task_gets_and_its_process_finds_it(hands: Hands) -> None:
    broker = hands.broker
    say = ["sh", "-c", 'test "$GPUBROKER_PROFILE/$GPUBROKER_MAX_CONCURRENCY" = "$0"']
    given = broker.submit([*say, "trainer_remote/10"], profile="trainer_remote")
    own = broker.submit([*say, "trainer/4"], profile="trainer", cpu=0.5, max_concurrency=4)
    assert (given.resources.cpu, given.resources.gpus) == (1, 0)
    assert (own.resources.cpu, own.resources.gpus) == (0.5, 1)
    for task in (given, own):
        assert broker.result(task, timeout_seconds=PATIENCE_SECONDS) == {"exit_code": 0}


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ({"cpu": 4, "memory_mb": 64}, {"cpu": 2}),
        ({"memory_mb": 3000}, {"memory_mb": 2000}),
        ({"cpu": 1, "custom": {"licence": 2}}, {"custom": {"licence": 1}}),
    ],
    ids=["cpu", "host memory", "a custom resource"],
)
def test_a_critical_task_without_gpus_preempts_too(
    hands: Hands, low: dict[str, Any], high: dict[str, Any]
) -> None:
    there: dict[str, Any] = {"nodes": {"node": ["n2"]}, "grace_seconds": 1}
    victim = hands.at_work("victim", **low, **there)
    hands.end(hands.at_work("critical", priority=95, **{"cpu": 1, **high}, **there))
    [ended] = hands.end(victim)
    assert (ended.preemptions, ended.attempt) == (1, 2)


def test_a_share_is_of_what_a_gpu_has_and_who_asks_for_it_alone_is_alone(hands: Hands) -> None:
    half = hands.at_work("half", gpu_fraction=0.5, **SMALL)
    assert [device.gpu_mb for device in half.devices] == [12 * GIB]
    alone = hands.waiting("alone", "WaitingForMemory", gpu_mb=1000, exclusive=True, **SMALL)
    hands.end(half)
    until(lambda: hands.broker.get(alone).state == "running", "it has the GPU for itself")
    beside = hands.waiting("beside", "WaitingForMemory", gpu_mb=1000, **SMALL)
    hands.end(alone, beside)


def test_what_a_process_costs_is_leased_with_it_and_shown_apart(hands: Hands) -> None:
    task = hands.at_work("task", gpu_mb=4096, **BIG)
    assert [(device.gpu_mb, device.context_mb) for device in task.devices] == [(4608, 512)]
    [holder] = [holder for gpu in hands.broker.gpus() for holder in gpu.holders]
    assert (holder.gpu_mb, holder.context_mb) == (4608, 512)
    hands.end(task)


def test_roles_that_take_turns_get_the_most_of_each_and_find_their_names(hands: Hands) -> None:
    broker = hands.broker
    roles = {"train": {"gpu_mb": 9000}, "generate": {"gpu_mb": 5000, "cpu": 2}}
    say = ["sh", "-c", 'test "$GPUBROKER_ROLES" = generate,train']
    task = broker.submit(say, roles=roles)
    assert (task.resources.gpu_mb, task.resources.cpu) == (9000, 2)
    assert broker.result(task, timeout_seconds=PATIENCE_SECONDS) == {"exit_code": 0}


def test_instances_of_a_gpu_are_leased_and_the_gpu_is_not(hands: Hands) -> None:
    task = hands.at_work("task", gpus=1, kinds=["sim-slice"])
    gpus = {(gpu.node, gpu.uuid): gpu for gpu in hands.broker.gpus()}
    instance = gpus[str(task.node), task.devices[0].uuid]
    parent = gpus[str(task.node), instance.parent]
    assert (instance.kind, instance.leased_mb, instance.free_mb) == ("sim-slice", 10 * GIB, 0)
    assert (parent.kind, parent.split, parent.leased_mb, parent.free_mb) == ("sim-split", True, 0, 0)
    with pytest.raises(Refused):
        hands.hold("whole", gpus=1, kinds=["sim-split"])
    hands.end(task)


def test_no_more_run_at_once_than_a_label_allows(hands: Hands) -> None:
    nightly = {"cpu": 0.1, "labels": {"run": "nightly"}}
    one = hands.at_work("one", **nightly)
    other = hands.waiting("other", "ConcurrencyLimited", **nightly)
    hands.end(hands.at_work("release", cpu=0.1, labels={"run": "release"}))
    hands.end(one, other)


def test_tasks_go_where_others_are_or_where_nobody_is(hands: Hands) -> None:
    first = hands.at_work("first", gpu_mb=1000, kinds=["sim-small"])
    beside = hands.at_work("beside", gpu_mb=1000, kinds=["sim-small"], placement="pack")
    apart = hands.at_work("apart", gpu_mb=1000, kinds=["sim-small"], placement="spread")
    assert first.node == beside.node != apart.node
    hands.end(first, beside, apart)
    one, other = (hands.at_work(name, cpu=0.1, placement="spread") for name in ("one", "other"))
    assert one.node != other.node
    hands.end(one, other)
