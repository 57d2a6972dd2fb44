"""Calls to the workers of a set, over HTTP."""

import asyncio
import base64

import cloudpickle
import pytest
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import Ended, Ending, Failure, Gone
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.gateway.workers import call_routing

from tests.gateway.harness import Client, Gateway
from tests.gateway.worker_stage import Workers, formed, running
from tests.patience import PATIENCE_SECONDS


async def test_a_call_is_answered_by_a_worker_that_keeps_its_state(
    gateway: Gateway, api: Client, workers: Workers
) -> None:
    seen = await running(gateway, api, workers)
    path = f"/worker-sets/{seen['id']}/call"
    assert (await api.post(path, json={"method": "add", "args": [5]})).json()["result"] == 15
    told = (await api.post(path, json={"method": "add", "kwargs": {"number": 1}})).json()
    assert (told["result"], told["worker"], told["attempt"]) == (16, seen["id"], 1)
    pickled = base64.b64encode(cloudpickle.dumps(((4,), {}))).decode()
    told = (await api.post(path, json={"method": "add", "pickled": pickled})).json()
    assert cloudpickle.loads(base64.b64decode(told["data_base64"])) == 20


async def test_calls_go_to_the_workers_in_turn_and_past_a_busy_one(
    gateway: Gateway, api: Client, workers: Workers
) -> None:
    seen = await running(gateway, api, workers, 2)
    path = f"/worker-sets/{seen['id']}/call"

    async def by(routing: str) -> str:
        body = {"method": "add", "args": [1], "routing": routing}
        return str((await api.post(path, json=body)).json()["worker"])

    await until_ready(gateway, api, path, 2)
    assert len({await by("round_robin") for _ in range(2)}) == 2
    waiting = asyncio.create_task(api.post(path, json={"method": "wait"}))
    busy = await first_busy(workers)
    assert {await by("least_queue") for _ in range(4)} == {it["id"] for it in seen["workers"]} - {busy}
    workers.end()
    assert (await waiting).json()["worker"] == busy


async def until_ready(gateway: Gateway, api: Client, path: str, count: int) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        seen: set[str] = set()
        while len(seen) < count:
            answer = await api.post(path, json={"method": "add", "args": [0]})
            seen.add(answer.json()["worker"])


async def first_busy(workers: Workers) -> str:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            for task, solver in workers.solvers.items():
                if await asyncio.to_thread(solver.has_begun.wait, 0.01):
                    return task


async def test_a_failed_call_says_why(gateway: Gateway, api: Client, workers: Workers) -> None:
    seen = await running(gateway, api, workers)
    answer = await api.post(f"/worker-sets/{seen['id']}/call", json={"method": "fail"})
    told = answer.json()
    assert (answer.status_code, told["code"]) == (502, "call-failed")
    assert "ValueError: no" in told["detail"]
    assert told["errors"][0]["code"] == "exception"
    assert "Traceback" in told["errors"][0]["detail"]


async def test_a_call_that_takes_too_long_says_what_has_become_of_it(
    gateway: Gateway, api: Client, workers: Workers
) -> None:
    seen = await running(gateway, api, workers)
    path = f"/worker-sets/{seen['id']}/call"
    await until_ready(gateway, api, path, 1)

    async def late(method: str) -> str:
        answer = await api.post(path, json={"method": method, "timeout_seconds": 0.2})
        assert (answer.status_code, answer.json()["code"]) == (504, "call-timeout")
        return str(answer.json()["detail"])

    begun, not_begun = (
        "did not answer within 0.2 s; the method may go on",
        "and never will: its time was over",
    )
    told: list[str] = []
    while not workers.solvers[seen["id"]].has_begun.is_set():
        told.append(await late("wait"))
    assert begun in told[-1]
    while not_begun not in await late("add"):
        pass
    workers.end()


async def test_call_to_a_hanging_worker_is_given_up_but_counts_until_answered(
    gateway: Gateway, api: Client, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_routing, "MAX_WAITING", 0)
    seen = await running(gateway, api, workers)
    path = f"/worker-sets/{seen['id']}/call"
    await until_ready(gateway, api, path, 1)
    workers.hangs = asyncio.Event()
    body = {"method": "add", "args": [1], "timeout_seconds": 0.05}
    answer = await api.post(path, json=body)
    assert (answer.status_code, answer.json()["code"]) == (504, "call-timeout")
    assert "did not answer within 0.05 s; the method may go on there" in answer.json()["detail"]
    assert (await api.post(path, json=body)).json()["code"] == "worker-queue-full"
    workers.hangs.set()
    while (await api.post(path, json=body)).status_code == 429:
        await asyncio.to_thread(workers.solvers[seen["id"]].has_begun.wait, 0.01)


async def test_a_worker_has_a_bounded_size_of_calls(
    gateway: Gateway, api: Client, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_routing, "MAX_BYTES", 200)
    seen = await running(gateway, api, workers)
    path = f"/worker-sets/{seen['id']}/call"
    waiting = asyncio.create_task(api.post(path, json={"method": "wait", "args": []}))
    await first_busy(workers)
    refused = await api.post(path, json={"method": "add", "args": ["x" * 200]})
    assert (refused.status_code, refused.json()["code"]) == (429, "worker-queue-full")
    workers.solvers[seen["id"]].goes_on.set()
    await waiting
    alone = await api.post(path, json={"method": "add", "args": ["x" * 200]})
    assert alone.json()["code"] == "call-failed", "it was sent"


async def test_what_a_worker_refuses_has_not_begun(gateway: Gateway, api: Client, workers: Workers) -> None:
    seen = await running(gateway, api, workers)
    workers.refuses.add(seen["id"])
    body = {"method": "add", "args": [1], "timeout_seconds": 2}
    answer = await api.post(f"/worker-sets/{seen['id']}/call", json=body)
    assert (answer.status_code, answer.json()["code"]) == (503, "no-worker")
    assert "1 running" in answer.json()["detail"]
    assert "; it has not begun; " in answer.json()["detail"]


async def test_without_a_ready_worker_a_call_says_where_they_stand(
    gateway: Gateway, api: Client, workers: Workers
) -> None:
    seen = await formed(gateway, api, count=1, max_count=2)
    body = {"method": "add", "args": [1], "timeout_seconds": 0.01}
    answer = await api.post(f"/worker-sets/{seen['id']}/call", json=body)
    assert (answer.status_code, answer.json()["code"]) == (503, "no-worker")
    assert "1 pending, 1 held" in answer.json()["detail"]


async def test_a_call_waits_for_the_first_worker(gateway: Gateway, api: Client, workers: Workers) -> None:
    seen = await formed(gateway, api)
    path = f"/worker-sets/{seen['id']}/call"
    waiting = asyncio.create_task(api.post(path, json={"method": "add", "args": [1]}))
    await asyncio.sleep(0)
    await workers.start(gateway, seen["id"])
    assert (await waiting).json()["result"] == 11


async def test_a_call_to_an_attempt_that_is_over_goes_to_the_next_one(
    gateway: Gateway, api: Client, workers: Workers
) -> None:
    seen = await running(gateway, api, workers)
    path = f"/worker-sets/{seen['id']}/call"
    assert (await api.post(path, json={"method": "add", "args": [1]})).json()["attempt"] == 1
    task, now = gateway.task(seen["id"]), gateway.clock.now()
    workers.away.update(workers.hosts)
    failure = Failure("killed", "it was killed")
    await gateway.hear(Ended(task.id, task.fence, now, Ending.LOST, failure=failure))
    await gateway.hear(Gone(task.id, task.fence, now, Proof.PROCESS_ABSENT))
    waiting = asyncio.create_task(api.post(path, json={"method": "add", "args": [1]}))
    assert gateway.task(seen["id"]).state is TaskState.PENDING
    gateway.clock.advance(60.0)
    gateway.world.enter_due(gateway.clock.now())
    await workers.start(gateway, seen["id"])
    told = (await waiting).json()
    assert (told["attempt"], told["result"]) == (2, 11)


async def test_a_call_that_is_lost_with_its_worker_is_not_sent_again(
    gateway: Gateway, api: Client, workers: Workers
) -> None:
    seen = await running(gateway, api, workers)
    waiting = asyncio.create_task(api.post(f"/worker-sets/{seen['id']}/call", json={"method": "wait"}))
    await first_busy(workers)
    workers.lost.set()
    answer = await waiting
    assert (answer.status_code, answer.json()["code"]) == (502, "worker-lost")


async def test_a_gateway_without_a_driver_says_so(gateway: Gateway, api: Client) -> None:
    seen = await formed(gateway, api)
    answer = await api.post(f"/worker-sets/{seen['id']}/call", json={"method": "add"})
    assert (answer.status_code, answer.json()["code"]) == (409, "no-ray-driver")


async def test_a_call_says_why_a_worker_that_runs_is_not_to_be_reached(
    gateway: Gateway, api: Client, workers: Workers
) -> None:
    seen = await running(gateway, api, workers)
    workers.away.update(workers.hosts)
    body = {"method": "add", "args": [1], "timeout_seconds": 0.3}
    answer = await api.post(f"/worker-sets/{seen['id']}/call", json=body)
    assert (answer.status_code, answer.json()["code"]) == (503, "no-worker")
    assert "1 running (it is not here)" in answer.json()["detail"]


async def test_a_call_to_a_set_that_is_over_is_refused_at_once(
    gateway: Gateway, api: Client, workers: Workers
) -> None:
    seen = await formed(gateway, api)
    await api.delete(f"/worker-sets/{seen['id']}")
    await gateway.turn()
    await gateway.turn()
    assert gateway.world.worker_sets == {}
    answer = await api.post(f"/worker-sets/{seen['id']}/call", json={"method": "add", "args": [1]})
    assert (answer.status_code, answer.json()["code"]) == (409, "task-already-finished")
    assert "is over" in answer.json()["detail"]


async def test_a_tenant_has_a_bounded_number_of_calls_that_wait_for_a_worker() -> None:
    async with Gateway(tenant_waits=1) as gateway:
        gateway.change(worker_calls=Workers())
        api = await gateway.client("ada", "tasks:read", "tasks:write")
        path = f"/worker-sets/{(await formed(gateway, api))['id']}/call"
        body = {"method": "add", "timeout_seconds": 600}
        calls = {asyncio.create_task(api.post(path, json=body)) for _ in range(2)}
        [refused], [waiting] = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        assert (refused.result().status_code, refused.result().json()["code"]) == (429, "tenant-waits")
        waiting.cancel()


async def test_calls_in_turn_pass_a_worker_that_has_no_room(
    gateway: Gateway, api: Client, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_routing, "MAX_WAITING", 0)
    seen = await running(gateway, api, workers, 2)
    path = f"/worker-sets/{seen['id']}/call"
    await until_ready(gateway, api, path, 2)
    waiting = asyncio.create_task(api.post(path, json={"method": "wait"}))
    busy = await first_busy(workers)
    body = {"method": "add", "args": [1], "routing": "round_robin"}
    answered = {(await api.post(path, json=body)).json()["worker"] for _ in range(2)}
    assert answered == {it["id"] for it in seen["workers"]} - {busy}
    full = asyncio.create_task(api.post(path, json={"method": "wait"}))
    async with asyncio.timeout(PATIENCE_SECONDS):
        for solver in workers.solvers.values():
            while not await asyncio.to_thread(solver.has_begun.wait, 0.01):
                pass
    refused = await api.post(path, json=body)
    assert (refused.status_code, refused.json()["code"]) == (429, "worker-queue-full")
    workers.end()
    await asyncio.gather(waiting, full)
