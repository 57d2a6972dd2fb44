"""Worker sets over HTTP. The workers are the real ones, in threads of this process."""

import asyncio
import base64
import json
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import cloudpickle
import pytest
from gpubroker.runtime.calls import CallWorker
from gpubroker.runtime.host import RunHost
from gpubroker.runtime.journal import Journal
from gpubroker.runtime.messages import RunKey, RunOrder
from gpubroker_server.adapters.ray.driver.worker_calls import answer_of
from gpubroker_server.core.domain.orders import Ended, Ending, Failure, Gone
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Seconds, TaskId
from gpubroker_server.core.lifecycle.worker_sets.members import due
from gpubroker_server.core.lifecycle.worker_sets.scaling import Autoscaler
from gpubroker_server.ports.worker_calls import CallAnswer, NotBegun, WorkerCall, WorkerLost, WorkerRun

from tests.gateway.harness import Client, Gateway
from tests.patience import PATIENCE_SECONDS

RUN = {"entrypoint": "myteam.solvers:Solver", "kwargs": {"start": 10}}
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


class Solver:
    def __init__(self, start: int) -> None:
        self.value = start
        self.goes_on = threading.Event()
        self.has_begun = threading.Event()

    def add(self, number: int) -> int:
        self.value += number
        return self.value

    def wait(self) -> int:
        self.has_begun.set()
        assert self.goes_on.wait(PATIENCE_SECONDS)
        return self.value

    def fail(self) -> None:
        raise ValueError("no")


class Workers:
    """The processes of workers, as an executor would have them."""

    def __init__(self) -> None:
        self.hosts: dict[tuple[TaskId, int], RunHost] = {}
        self.solvers: dict[TaskId, Solver] = {}
        self.lost: asyncio.Event = asyncio.Event()

    async def start(self, gateway: Gateway, task_id: str) -> None:
        await gateway.admit(task_id)
        task = gateway.task(task_id)
        spec = (await gateway.store.specs([task.id]))[task.id]
        solver = self.solvers[task.id] = Solver(**json.loads(spec.arguments)["kwargs"])
        host = self.hosts[task.id, task.fence] = RunHost(Journal(lambda _delay: None))
        SOLVERS[task.id] = solver
        host.start_shared(
            RunOrder(
                task=task.id,
                fence=task.fence,
                kind="function",
                python=PYTHON,
                arguments=cloudpickle.dumps((solver_of, (task.id,), {})),
                env=dict(spec.env),
            )
        )

    async def call(self, run: WorkerRun, call: WorkerCall, seconds: Seconds) -> CallAnswer:
        host = self.hosts.get((run.task, run.fence))
        callee = None if host is None else host.callees.get(RunKey(run.task, run.fence, 0))
        if callee is None:
            return NotBegun("it is not here")
        async with asyncio.timeout(seconds):
            return await self._answer(callee, call, seconds)

    async def _answer(self, callee: CallWorker, call: WorkerCall, seconds: Seconds) -> CallAnswer:
        answered = asyncio.wrap_future(callee.submit(*call, seconds))
        lost = asyncio.create_task(self.lost.wait())
        await asyncio.wait({answered, lost}, return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        return answer_of(answered.result()) if answered.done() else WorkerLost("killed")

    def end(self) -> None:
        for solver in self.solvers.values():
            solver.goes_on.set()
        for (task, fence), host in self.hosts.items():
            host.stop(RunKey(task, fence, 0))


SOLVERS: dict[str, Solver] = {}


def solver_of(task: str) -> Solver:
    return SOLVERS[task]


@pytest.fixture
async def workers(gateway: Gateway) -> AsyncIterator[Workers]:
    found = Workers()
    gateway.change(worker_calls=found)
    yield found
    found.end()


async def formed(gateway: Gateway, api: Client, **fields: Any) -> dict[str, Any]:
    body = {"run": RUN, "resources": {"cpu": 0.1}, **fields}
    answer = await api.post("/worker-sets", json=body)
    assert answer.status_code == 202, answer.text
    await lead(gateway)
    return dict((await api.get(answer.headers["Location"])).json())


async def lead(gateway: Gateway) -> None:
    await gateway.commit(*due(gateway.world, {}, Autoscaler(), gateway.clock.now()))


async def running(gateway: Gateway, api: Client, workers: Workers, count: int = 1, **more: Any) -> Any:
    """A set with so many workers at work."""
    seen = await formed(gateway, api, count=count, **more)
    for worker in seen["workers"][:count]:
        await workers.start(gateway, worker["id"])
    return seen


async def test_as_many_tasks_wait_as_are_wanted_and_the_other_places_are_held(
    gateway: Gateway, api: Client
) -> None:
    seen = await formed(
        gateway, api, count=1, min_count=0, max_count=3, name="solvers", max_concurrency=4,
        labels={"team": "x"}, health={"method": "ping"}, scale={"by": "signal", "target": 2},
    )  # fmt: skip
    assert (seen["count"], seen["min_count"], seen["max_count"], seen["places"]) == (1, 0, 3, 3)
    assert seen["states"] == {"pending": 1, "held": 2}
    task = TaskId(seen["workers"][2]["id"])
    spec = (await gateway.store.specs([task]))[task]
    assert spec.labels == {"team": "x", "worker_set": seen["id"]}
    terms = json.loads(spec.env["GPUBROKER_WORKER_SET"])
    assert (terms["id"], terms["max_concurrency"], terms["health"]["method"]) == (seen["id"], 4, "ping")
    assert not gateway.task(task).shareable
    assert gateway.task(task).max_retries == 2**31 - 1
    assert [it["id"] for it in (await api.get("/worker-sets")).json()["worker_sets"]] == [seen["id"]]


async def test_the_worker_gets_the_most_of_what_its_roles_need(gateway: Gateway, api: Client) -> None:
    roles = {"judge": {"run": {"entrypoint": "myteam.solvers:Judge", "args": [1]}, "gpu_mb": 4096}}
    seen = await formed(gateway, api, resources={"gpu_mb": 1024, "cpu": 3.0}, colocate_with=roles)
    task = gateway.task(seen["id"])
    assert (task.demand.gpus, task.demand.gpu_mb, task.demand.cpu) == (1, 4096, 3.0)
    spec = (await gateway.store.specs([task.id]))[task.id]
    told = json.loads(spec.env["GPUBROKER_WORKER_SET"])["roles"]
    assert told == {"judge": {"entrypoint": "myteam.solvers:Judge", "args": [1], "kwargs": {}}}


@pytest.mark.parametrize(
    ("fields", "code", "pointer"),
    [
        ({"run": {"command": ["true"]}}, "no-methods", "/run/command"),
        ({"resources": {"bundles": [{"cpu": 1}]}}, "no-gang", "/resources/bundles"),
        ({"max_retries": 2}, "max-restarts", "/max_retries"),
        ({"held": True}, "count", "/held"),
        ({"labels": {"worker_set": "x"}}, "reserved", "/labels/worker_set"),
        ({"count": 3, "max_count": 2}, "contradiction", ""),
        ({"count": 0}, "contradiction", ""),
        ({"min_count": 0, "scale": {"by": "cpu", "target": 50.0}}, "contradiction", ""),
        ({"profile": "nobody"}, "unknown", "/profile"),
        ({"colocate_with": {"a": {"run": RUN, "profile": "nobody"}}}, "unknown", "/colocate_with/a/profile"),
    ],
)
async def test_what_a_worker_cannot_have_is_refused(
    api: Client, fields: dict[str, Any], code: str, pointer: str
) -> None:
    answer = await api.post("/worker-sets", json={"run": RUN, **fields})
    assert answer.status_code == 422, answer.text
    assert [(fault["code"], fault["pointer"]) for fault in answer.json()["errors"]] == [(code, pointer)]


async def test_a_repeated_request_gets_the_set_and_another_body_is_refused(
    gateway: Gateway, api: Client
) -> None:
    headers = {"Idempotency-Key": '"k"'}
    first = await api.post("/worker-sets", json={"run": RUN}, headers=headers)
    again = await api.post("/worker-sets", json={"run": RUN}, headers=headers)
    assert (again.json()["id"], again.headers["Idempotency-Replayed"]) == (first.json()["id"], "true")
    other = await api.post("/worker-sets", json={"run": RUN, "count": 2}, headers=headers)
    assert other.json()["code"] == "idempotency-key-reused"
    assert len(gateway.world.worker_sets) == 1


async def test_a_set_that_was_cut_off_between_its_commits_is_formed_by_the_repeated_request(
    gateway: Gateway, api: Client
) -> None:
    gateway.leads = False
    headers = {"Idempotency-Key": '"k"'}
    seen = (await api.post("/worker-sets", json={"run": RUN}, headers=headers)).json()
    assert (seen["states"], gateway.world.worker_sets) == ({"held": 1}, {})
    gateway.leads = True
    await api.post("/worker-sets", json={"run": RUN}, headers=headers)
    assert set(gateway.world.worker_sets) == {seen["id"]}


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


async def test_a_call_that_takes_too_long_is_given_up(
    gateway: Gateway, api: Client, workers: Workers
) -> None:
    seen = await running(gateway, api, workers)
    body = {"method": "wait", "timeout_seconds": 0.05}
    answer = await api.post(f"/worker-sets/{seen['id']}/call", json=body)
    assert (answer.status_code, answer.json()["code"]) == (504, "call-timeout")


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
    workers.hosts.clear()
    failure = Failure("killed", "it was killed")
    await gateway.hear(Ended(task.id, task.fence, now, Ending.LOST, failure=failure))
    await gateway.hear(Gone(task.id, task.fence, now, "process_absent"))
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


async def test_a_set_is_scaled_within_its_places(gateway: Gateway, api: Client) -> None:
    seen = await formed(gateway, api, count=1, max_count=3)
    path = f"/worker-sets/{seen['id']}"
    assert (await api.patch(path, json={"count": 3})).json()["count"] == 3
    await lead(gateway)
    assert (await api.get(path)).json()["states"] == {"pending": 3}
    assert (await api.patch(path, json={"count": 0})).json()["min_count"] == 0
    await lead(gateway)
    assert (await api.get(path)).json()["states"] == {"held": 3}
    refused = await api.patch(path, json={"count": 4})
    assert (refused.status_code, refused.json()["errors"][0]["code"]) == (422, "contradiction")


async def test_a_place_that_is_not_wanted_says_so(gateway: Gateway, api: Client) -> None:
    seen = await formed(gateway, api, count=1, max_count=2)
    told = (await api.get(f"/tasks/{seen['workers'][1]['id']}/explain")).json()
    assert (told["reason"], seen["id"] in told["message"]) == ("Held", True)
    assert "wants 1 of 2 workers" in told["message"]
    alone = await api.submit({"entrypoint": "myteam.solvers:Solver"}, held=True)
    assert "held in the queue" in (await api.get(f"/tasks/{alone}/explain")).json()["message"]


async def test_a_signal_is_for_sets_that_follow_one(gateway: Gateway, api: Client) -> None:
    scale = {"by": "signal", "target": 10.0}
    seen = await formed(gateway, api, count=0, max_count=3, scale=scale)
    path = f"/worker-sets/{seen['id']}/signal"
    assert (await api.post(path, json={"value": 15.0})).json()["signal"] == 15.0
    await lead(gateway)
    assert (await api.get(f"/worker-sets/{seen['id']}")).json()["count"] == 2
    other = await formed(gateway, api)
    refused = await api.post(f"/worker-sets/{other['id']}/signal", json={"value": 1.0})
    assert refused.json()["errors"][0]["code"] == "no-signal"


async def test_a_set_that_is_ended_is_over_when_its_workers_are_gone(
    gateway: Gateway, api: Client, workers: Workers
) -> None:
    seen = await running(gateway, api, workers)
    path = f"/worker-sets/{seen['id']}"
    assert (await api.delete(path)).status_code == 202
    task = gateway.task(seen["id"])
    assert task.state is TaskState.STOPPING
    now = gateway.clock.now()
    await gateway.hear(Ended(task.id, task.fence, now, Ending.STOPPED))
    await gateway.hear(Gone(task.id, task.fence, now, "process_absent"))
    await lead(gateway)
    assert gateway.world.worker_sets == {}
    told = (await api.get(path)).json()
    assert (told["state"], told["workers"]) == ("over", [])
    assert (await api.delete(path)).status_code == 200


async def test_another_tenant_sees_no_set(gateway: Gateway, api: Client) -> None:
    seen = await formed(gateway, api)
    other = await gateway.client("eve", "tasks:read", "tasks:write", tenant="acme")
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/call")):
        body = {"json": {"method": "add"}} if path else {}
        answer = await other.request(method, f"/worker-sets/{seen['id']}{path}", **body)
        assert answer.status_code == 404, path
    assert (await other.get("/worker-sets")).json() == {"worker_sets": []}


async def test_a_worker_alone_cannot_be_submitted_again(gateway: Gateway, api: Client) -> None:
    seen = await formed(gateway, api)
    await api.delete(f"/worker-sets/{seen['id']}")
    answer = await api.post(f"/tasks/{seen['id']}/retry")
    assert answer.json()["code"] == "task-not-retryable"
