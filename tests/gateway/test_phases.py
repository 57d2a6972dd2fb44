"""The phases of a task in answers: over all its attempts, alone and in lists."""

from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import Gone, NodeLost, Started
from gpubroker_server.core.domain.policy import Cutoffs
from gpubroker_server.core.domain.units import Fence, Instant, NodeName, Position, TaskId

from tests.builders import GIB, a_sample
from tests.gateway.harness import Client, Gateway


def later(gateway: Gateway, seconds: float) -> None:
    gateway.clock.advance(seconds)
    gateway.world.measure([a_sample(key, gateway.clock.now()) for key in gateway.world.ledgers])


async def phases(api: Client, task_id: str) -> list[float] | None:
    """Queued, admitted, starting, running, stopping; the same in the task's own answer and in the list."""
    alone = (await api.get(f"/tasks/{task_id}")).json()["phases"]
    listed = {one["id"]: one["phases"] for one in (await api.get("/tasks")).json()["items"]}
    assert listed[task_id] == alone
    return None if alone is None else list(alone.values())


async def test_a_task_says_how_long_it_has_been_in_each_phase(gateway: Gateway, api: Client) -> None:
    answer = await api.post("/tasks", json={"run": {"entrypoint": "tools:resize"}})
    assert list(answer.json()["phases"].values()) == [0.0, 0.0, 0.0, 0.0, 0.0]
    task_id = answer.json()["id"]
    later(gateway, 4.0)
    assert await phases(api, task_id) == [4.0, 0.0, 0.0, 0.0, 0.0]
    await gateway.plan(task_id)
    later(gateway, 2.0)
    assert await phases(api, task_id) == [4.0, 2.0, 0.0, 0.0, 0.0]
    started, ordered_at = gateway.clock.now(), Instant(gateway.clock.now() - 1.5)
    await gateway.hear(Started(TaskId(task_id), Fence(1), started, pid=1, ordered_at=ordered_at))
    later(gateway, 30.0)
    assert await phases(api, task_id) == [4.0, 0.5, 1.5, 30.0, 0.0]
    await gateway.end(task_id)
    later(gateway, 100.0)
    assert await phases(api, task_id) == [4.0, 0.5, 1.5, 30.0, 0.0]


async def test_attempts_and_a_stop_are_counted_from_the_event_log(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit(resources={"gpu_mb": 18 * GIB})
    await gateway.admit(task_id)
    later(gateway, 10.0)
    await gateway.hear(NodeLost(NodeName("n1"), "n1-1", gateway.clock.now(), "silent"))
    later(gateway, 5.0)
    assert await phases(api, task_id) == [5.0, 0.0, 0.0, 10.0, 0.0]
    await gateway.reopen()
    await gateway.admit(task_id)
    later(gateway, 1.0)
    await api.post(f"/tasks/{task_id}/cancel")
    await gateway.turn()
    later(gateway, 2.0)
    assert await phases(api, task_id) == [5.0, 0.0, 0.0, 11.0, 2.0]
    task = gateway.task(task_id)
    await gateway.hear(Gone(task.id, task.fence, gateway.clock.now(), Proof.PROCESS_ABSENT))
    later(gateway, 7.0)
    assert await phases(api, task_id) == [5.0, 0.0, 0.0, 11.0, 2.0]


async def test_phases_are_null_where_the_log_no_longer_goes_back_to_the_submit(
    gateway: Gateway, api: Client
) -> None:
    task_id = await api.submit(resources={"gpu_mb": 18 * GIB})
    await gateway.admit(task_id)
    await gateway.hear(NodeLost(NodeName("n1"), "n1-1", gateway.clock.now(), "silent"))
    later(gateway, 5.0)
    assert await phases(api, task_id) == [5.0, 0.0, 0.0, 0.0, 0.0]
    now, none = gateway.clock.now(), Instant(0.0)
    head = gateway.world.position
    cutoffs = Cutoffs(finished=now, keyed=none, audited=none, heard=Position(head), expired=none)
    await gateway.store.prune(gateway.term, cutoffs)
    assert await phases(api, task_id) is None
