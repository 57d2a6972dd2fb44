"""Gangs over HTTP: bundles in the request, ranks in the answers, and why one waits."""

from typing import Any

import pytest
from gpubroker_server.core.domain.holders import MemberState
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import Ended, Ending, Failure, Gone, Ready, Started
from gpubroker_server.core.domain.task import Task, members_of

from tests.builders import GIB
from tests.gateway.harness import Client, Gateway, a_body, fault, problem

FOUR = {"bundles": [{"count": 4, "gpu_mb": 4096}]}


def about(task: Task, rank: int, now: Any) -> tuple[Any, Any, Any]:
    return task.id, task.fence, now


async def ready(gateway: Gateway, task_id: str, *ranks: int) -> None:
    task, now = gateway.task(task_id), gateway.clock.now()
    for rank in ranks:
        who = about(task, rank, now)
        await gateway.hear(Started(*who, pid=1, rank=rank), Ready(*who, f"10.0.0.1:{rank}", rank))


async def test_a_gang_shows_its_bundles_and_once_it_is_placed_its_ranks(
    gateway: Gateway, api: Client
) -> None:
    task_id = await api.submit(
        resources={
            "bundles": [{"count": 2, "gpu_mb": 1024}, {"cpu": 2, "memory_mb": 64}],
            "strategy": "spread",
            "min_ranks": 2,
        }
    )
    task = (await api.get(f"/tasks/{task_id}")).json()
    assert [(b["count"], b["gpus"], b["gpu_mb"], b["cpu"]) for b in task["resources"]["bundles"]] == [
        (2, 1, 1024, 0.0), (1, 0, None, 2.0),
    ]  # fmt: skip
    assert (task["resources"]["strategy"], task["resources"]["min_ranks"]) == ("spread", 2)
    assert task["ranks"] is None
    await gateway.plan(task_id)
    await ready(gateway, task_id, 0)
    task = (await api.get(f"/tasks/{task_id}")).json()
    assert [(r["rank"], r["state"], len(r["devices"])) for r in task["ranks"]] == [
        (0, "ready", 1), (1, "placed", 1), (2, "placed", 0),
    ]  # fmt: skip
    told = (await api.get(f"/tasks/{task_id}/explain")).json()
    assert "1 of its 3 ranks ready" in told["message"]


async def test_a_gang_runs_ends_and_answers_with_the_result_of_rank_zero(
    gateway: Gateway, api: Client
) -> None:
    task_id = await api.submit(resources=FOUR)
    await gateway.plan(task_id)
    await ready(gateway, task_id, 0, 1, 2, 3)
    view = (await api.get(f"/tasks/{task_id}")).json()
    assert (view["state"], {rank["state"] for rank in view["ranks"]}) == ("running", {"running"})
    assert "4 ranks" in (await api.get(f"/tasks/{task_id}/explain")).json()["message"]
    task, now = gateway.task(task_id), gateway.clock.now()
    for rank in range(4):
        ended = Ended(task.id, task.fence, now, Ending.SUCCEEDED, b"%d" % rank, rank=rank)
        await gateway.hear(ended, Gone(task.id, task.fence, now, Proof.PROCESS_ABSENT, rank=rank))
    assert (await api.get(f"/tasks/{task_id}/result")).json()["result"] == 0
    view = (await api.get(f"/tasks/{task_id}")).json()
    assert (view["state"], {rank["state"] for rank in view["ranks"]}) == ("succeeded", {"succeeded"})


async def test_the_error_of_a_gang_names_the_rank_that_failed_first(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit(resources=FOUR)
    await gateway.plan(task_id)
    await ready(gateway, task_id, 0, 1, 2, 3)
    task, now = gateway.task(task_id), gateway.clock.now()
    boom = Failure("exception", "boom")
    await gateway.hear(Ended(task.id, task.fence, now, Ending.FAILED, failure=boom, rank=2))
    view = (await api.get(f"/tasks/{task_id}")).json()
    assert (view["state"], view["stop_reason"]) == ("stopping", "rank_failed")
    assert view["error"]["message"] == "rank 2: boom"
    assert members_of(gateway.task(task_id))[2].state is MemberState.ENDED


async def test_restrictions_beside_bundles_hold_for_all_ranks(gateway: Gateway, api: Client) -> None:
    ranks = [{"gpu_mb": 64}, {"gpu_mb": 64, "kinds": ["H100"]}]
    task_id = await api.submit(resources={"bundles": ranks, "kinds": ["simulated", "H100"]})
    bundles = gateway.task(task_id).demand.bundles
    assert [bundle.where.kinds for bundle in bundles] == [("simulated", "H100"), ("H100",)]


@pytest.mark.parametrize(
    ("resources", "says"),
    [
        ({"bundles": [{"gpus": 1}], "gpus": 2}, "gpus has no effect beside bundles"),
        ({"strategy": "spread"}, "strategy and min_ranks are for bundles"),
        ({"bundles": [{"count": 200}, {"count": 100}]}, "300 ranks; at most 256"),
        ({"bundles": [{"count": 2}], "min_ranks": 3}, "min_ranks is above the 2 ranks"),
    ],
)
async def test_resources_that_contradict_their_bundles_are_refused(
    api: Client, resources: dict[str, Any], says: str
) -> None:
    answer = await api.post("/tasks", json=a_body(resources=resources))
    assert says in fault(answer, "/resources")


async def test_only_the_word_learned_may_stand_for_the_size_of_a_rank(api: Client) -> None:
    answer = await api.post("/tasks", json=a_body(resources={"bundles": [{"gpu_mb": "guess"}]}))
    assert fault(answer, "/resources/bundles/0/gpu_mb") == 'must be a whole number; found "guess"'


@pytest.mark.parametrize(
    ("resources", "says"),
    [
        ({"bundles": [{"gpus": 1}, {"count": 3, "gpu_mb": 10_000_000}]}, "ranks 1 to 3: "),
        ({"bundles": [{"count": 100, "gpus": 1}]}, "100 ranks never fit at once: even when empty the"),
        (
            {"bundles": [{"count": 90, "cpu": 0.1}], "strategy": "strict_spread"},
            "90 ranks never fit each on a node of its own (strict_spread)",
        ),
    ],
)
async def test_a_gang_that_could_never_run_is_refused_with_the_rank_at_fault(
    api: Client, resources: dict[str, Any], says: str
) -> None:
    answer = await api.post("/tasks", json=a_body(resources=resources))
    assert says in problem(answer, 422, "exceeds-capacity")["detail"]
    assert answer.json()["errors"][0]["pointer"] == "/resources/bundles"


async def test_a_waiting_gang_shows_which_rank_has_no_room(gateway: Gateway, api: Client) -> None:
    whole = gateway.world.ledgers
    largest = max(ledger.device.allocatable_mb for ledger in whole.values())
    holder = await api.submit(resources={"gpu_mb": largest}, priority=90)
    await gateway.admit(holder)
    waits = await api.submit(resources={"bundles": [{"count": 2, "gpu_mb": 64}, {"cpu": 1}]})
    told = (await api.get(f"/tasks/{waits}/explain")).json()
    assert [(rank["reason"], rank["place"]) for rank in told["ranks"]] == [
        ("WaitingForMemory", None), ("WaitingForMemory", None), (None, {"node": "n1", "devices": []}),
    ]  # fmt: skip
    assert "room for none of the 3 ranks that must start together" in told["message"]
    assert (await api.get(f"/tasks/{waits}")).json()["pending"]["message"] == told["message"]


async def test_ranks_that_leave_are_shown_and_the_gang_goes_on_without_them(
    gateway: Gateway, api: Client
) -> None:
    other = await gateway.client("other", "tasks:read", "tasks:write", tenant="vision")
    resources = {"bundles": [{"count": 4, "gpu_mb": 15 * GIB}], "min_ranks": 2}
    gang = await other.submit(resources=resources, priority=10)
    await gateway.plan(gang)
    await ready(gateway, gang, 0, 1, 2, 3)
    urgent = await api.submit(resources={"gpu_mb": 45 * GIB}, priority=90)
    gateway.clock.advance(1)
    told = (await api.get(f"/tasks/{urgent}/explain")).json()
    assert told["preemption"]["why"] == "possible"
    await gateway.plan(urgent)
    view = (await other.get(f"/tasks/{gang}")).json()
    assert (view["state"], [rank["state"] for rank in view["ranks"]]) == (
        "running",
        ["running", "running", "leaving", "leaving"],
    )
    assert urgent not in (await other.get(f"/tasks/{gang}/events")).text
    task, now = gateway.task(gang), gateway.clock.now()
    for rank in (2, 3):
        await gateway.hear(
            Ended(task.id, task.fence, now, Ending.STOPPED, rank=rank),
            Gone(task.id, task.fence, now, Proof.PROCESS_ABSENT, rank=rank),
        )
    await gateway.admit(urgent)
    told = (await other.get(f"/tasks/{gang}/explain")).json()
    assert "2 ranks, 2 more stopped early" in told["message"]
    for rank in (0, 1):
        await gateway.hear(Ended(task.id, task.fence, now, Ending.SUCCEEDED, b"%d" % rank, rank=rank))
    view = (await other.get(f"/tasks/{gang}")).json()
    assert (view["state"], [rank["state"] for rank in view["ranks"]]) == (
        "succeeded",
        ["succeeded", "succeeded", "left", "left"],
    )
