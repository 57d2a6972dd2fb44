"""Elastic gangs under the limits of pools and custom resources: what their ranks hold counts."""

from typing import Any

from gpubroker_server.core.admission.pools import apply_pool
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.orders import Ending
from gpubroker_server.core.domain.policy import CustomLimit, Policy, Pool
from gpubroker_server.core.domain.task import Task, TaskState, members_of
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.explain.autoscaling import autoscaling_demand
from gpubroker_server.core.explain.explain import explain
from msgspec.structs import replace

from tests.builders import NOW, a_task, submit
from tests.core.elastic import LATER, plan
from tests.core.gangs import Agents, a_cluster, a_gang, admit_all, bundles, states
from tests.core.plans import whole

LAB = Pool("lab", gpus=2)
POLICY = Policy(
    pools=(LAB,),
    custom_limits=(
        CustomLimit("licence", 2.0),
        CustomLimit("pool:lab:gpus", 2.0),
        CustomLimit("tenant:*", 9.0),
    ),
)


def pooled(task: Task, policy: Policy = POLICY) -> Task:
    demand = apply_pool(task.demand, "lab", task.tenant, {}, policy, whole)
    assert isinstance(demand, Demand)
    return replace(task, demand=demand)


def a_pooled_gang(count: int = 3, least: int = 1, **fields: Any) -> Task:
    return pooled(a_gang("gang", *bundles(count, gpus=1), priority=20, min_ranks=least, **fields))


def at_work(gang: Task, *parts: Any, policy: Policy = POLICY) -> Agents:
    world = a_cluster(gang, *parts)
    admit_all(world, policy)
    agents = Agents(world, policy=policy)
    agents.run()
    agents.now = LATER
    return agents


def one(id: str, **fields: Any) -> Task:
    return pooled(a_task(id, gpus=1, priority=20, **fields))


def used(gang: Agents, name: str = "pool:lab:gpus") -> float:
    return gang.world.custom_use.get(name, 0.0)


def test_a_gang_begins_with_as_many_ranks_as_its_pool_has_left() -> None:
    gang = at_work(a_pooled_gang(3, 1), one("before", submitted_at=NOW - 10.0))
    assert (len(members_of(gang.task)), used(gang)) == (1, 2.0)
    assert used(gang, "tenant:default") == 2.0, "a gang is one running task"


def test_a_gang_that_shrank_gives_its_pool_back_what_it_no_longer_holds() -> None:
    gang = at_work(a_pooled_gang(2, 1))
    submit(gang.world, one("next"))
    assert (plan(gang), used(gang)) == ([], 2.0)
    gang.tell(gang.ended(1, Ending.FAILED), gang.gone(1))
    assert (states(gang.task)[1], used(gang)) == ("ended", 1.0)
    plan(gang)
    assert (gang.world.tasks[TaskId("next")].state, used(gang)) == (TaskState.ADMITTED, 2.0)


def test_rank_joins_once_its_pool_has_room_and_is_explained_until_then() -> None:
    gang = at_work(a_pooled_gang(3, 1), one("before", submitted_at=NOW - 10.0))
    assert plan(gang) == []
    message = explain(gang.world, gang.id, POLICY, gang.now).message
    assert "1 of the pool's gpus (pool lab)" in message
    before = gang.world.tasks[TaskId("before")]
    other = Agents(gang.world, "before", POLICY)
    other.now = LATER
    other.tell(other.started(0), other.ended(0, Ending.SUCCEEDED), other.gone(0))
    plan(gang)
    assert (states(gang.task), used(gang)) == (["ready", "placed"], 2.0)
    assert before.id not in gang.world.active


def test_custom_resources_of_ranks_count_alike() -> None:
    asks = bundles(3, gpus=1, custom=(("licence", 1.0),))
    gang = a_gang("gang", *asks, custom=(("licence", 1.0),), priority=20, min_ranks=1)
    agents = at_work(gang)
    assert (len(members_of(agents.task)), used(agents, "licence")) == (2, 2.0)


def test_a_gang_of_an_earlier_release_counts_its_pool_for_all_its_ranks() -> None:
    """Its row says what all of them take together, and nothing of each."""
    demand = Demand(bundles=bundles(2, gpus=1), min_ranks=1, pool="lab", slots=(("pool:lab:gpus", 2.0),))
    gang = at_work(replace(a_pooled_gang(2, 1), demand=demand))
    gang.tell(gang.ended(1, Ending.FAILED), gang.gone(1))
    assert used(gang) == 2.0


def test_critical_task_makes_a_rank_leave_that_holds_its_pool_share() -> None:
    gang = at_work(a_pooled_gang(2, 1))
    submit(gang.world, replace(one("critical"), priority=95))
    plan(gang)
    assert states(gang.task) == ["ready", "leaving"]
    assert gang.task.state is TaskState.RUNNING


def test_missing_ranks_for_which_the_pool_has_no_room_are_no_unmet_demand() -> None:
    gang = at_work(a_pooled_gang(4, 1), one("before", submitted_at=NOW - 10.0))
    found = autoscaling_demand(gang.world, POLICY, gang.now)
    assert (found.unmet, found.limited_tasks) == ((), 1)
    wider = replace(POLICY, custom_limits=(CustomLimit("pool:lab:gpus", 4.0),))
    assert autoscaling_demand(gang.world, wider, gang.now).unmet[0].gpus == 2
