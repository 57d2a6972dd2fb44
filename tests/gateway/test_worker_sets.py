"""Worker sets over HTTP: formed, read, scaled, ended."""

import asyncio
import json
from typing import Any

import pytest
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import Ended, Ending, Gone
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import TaskId

from tests.gateway.harness import Client, Gateway
from tests.gateway.worker_stage import RUN, Workers, formed, running


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
    assert spec.seat is not None
    assert spec.seat.health is not None
    assert (spec.seat.id, spec.seat.max_concurrency, spec.seat.health["method"]) == (seen["id"], 4, "ping")
    assert not gateway.task(task).shareable
    assert gateway.task(task).max_retries == 2**31 - 1
    assert [it["id"] for it in (await api.get("/worker-sets")).json()["items"]] == [seen["id"]]


async def test_the_worker_gets_the_most_of_what_its_roles_need(gateway: Gateway, api: Client) -> None:
    roles = {"judge": {"run": {"entrypoint": "myteam.solvers:Judge", "args": [1]}, "gpu_mb": 4096}}
    seen = await formed(gateway, api, resources={"gpu_mb": 1024, "cpu": 3.0}, colocate_with=roles)
    task = gateway.task(seen["id"])
    assert (task.demand.gpus, task.demand.gpu_mb, task.demand.cpu) == (1, 4096, 3.0)
    spec = (await gateway.store.specs([task.id]))[task.id]
    assert spec.seat is not None
    assert spec.seat.roles == {"judge": {"entrypoint": "myteam.solvers:Judge", "args": [1], "kwargs": {}}}


@pytest.mark.parametrize(
    ("fields", "code", "pointer"),
    [
        ({"run": {"command": ["true"]}}, "no-methods", "/run/command"),
        ({"resources": {"bundles": [{"cpu": 1}]}}, "no-gang", "/resources/bundles"),
        ({"max_retries": 2}, "max-restarts", "/max_retries"),
        ({"retry_on": ["timeout"]}, "max-restarts", "/retry_on"),
        ({"held": True}, "count", "/held"),
        ({"timeout_seconds": 60}, "no-end", "/timeout_seconds"),
        ({"deadline_seconds": 60}, "no-end", "/deadline_seconds"),
        ({"max_concurrency": 1001}, "less-than-equal", "/max_concurrency"),
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
    await gateway.turn()
    assert len(gateway.world.worker_sets) == 1


async def test_set_is_formed_in_the_commit_that_stores_its_workers(gateway: Gateway, api: Client) -> None:
    gateway.leads = False
    commits: list[list[str]] = []
    gateway.store.listen(lambda events: commits.append([event.kind for event in events]))
    headers = {"Idempotency-Key": '"k"'}
    seen = (await api.post("/worker-sets", json={"run": RUN}, headers=headers)).json()
    assert seen["states"] == {"held": 1}
    await api.post("/worker-sets", json={"run": RUN}, headers=headers)
    await gateway.turn()
    assert set(gateway.world.worker_sets) == {seen["id"]}
    assert [kind for kinds in commits for kind in kinds] == [
        "task.submitted", "request.made", "request.done", "worker_set.formed", "task.changed",
    ]  # fmt: skip


async def test_a_set_is_scaled_within_its_places(gateway: Gateway, api: Client) -> None:
    seen = await formed(gateway, api, count=1, max_count=3)
    path = f"/worker-sets/{seen['id']}"
    assert (await api.patch(path, json={"count": 3})).json()["count"] == 3
    await gateway.turn()
    assert (await api.get(path)).json()["states"] == {"pending": 3}
    assert (await api.patch(path, json={"count": 0})).json()["min_count"] == 0
    await gateway.turn()
    assert (await api.get(path)).json()["states"] == {"held": 3}
    refused = await api.patch(path, json={"count": 4})
    assert (refused.status_code, refused.json()["errors"][0]["code"]) == (422, "contradiction")


async def test_two_changes_at_once_both_count_and_none_undoes_the_other(
    gateway: Gateway, api: Client
) -> None:
    seen = await formed(gateway, api, count=1, max_count=3)
    path = f"/worker-sets/{seen['id']}"
    await asyncio.gather(api.patch(path, json={"min_count": 0}), api.patch(path, json={"count": 3}))
    told = (await api.get(path)).json()
    assert (told["min_count"], told["count"], told["max_count"]) == (0, 3, 3)


async def test_a_set_that_follows_its_calls_keeps_a_worker_to_report_them(
    gateway: Gateway, api: Client
) -> None:
    """Without one nothing would ever bring the first one back."""
    seen = await formed(gateway, api, count=1, max_count=3, scale={"by": "calls", "target": 2})
    refused = await api.patch(f"/worker-sets/{seen['id']}", json={"min_count": 0})
    assert "at least one is needed" in refused.json()["errors"][0]["detail"]


async def test_workers_run_on_past_the_time_limit_that_tasks_have_by_default(
    gateway: Gateway, api: Client
) -> None:
    seen = await formed(gateway, api, model_type="llm")
    assert (gateway.task(seen["id"]).timeout_seconds, gateway.task(seen["id"]).priority) == (None, 79)


async def test_a_role_needs_the_permission_for_its_entrypoint_too(gateway: Gateway, api: Client) -> None:
    secret = {"run": {"entrypoint": "elsewhere.secret:Judge"}}
    answer = await api.post("/worker-sets", json={"run": RUN, "colocate_with": {"judge": secret}})
    assert (answer.status_code, answer.json()["code"]) == (422, "entrypoint-not-allowed")
    assert "elsewhere.secret:Judge" in answer.json()["detail"]
    assert gateway.world.tasks == {}


async def test_stats_and_metrics_tell_of_workers(gateway: Gateway, api: Client, workers: Workers) -> None:
    await running(gateway, api, workers, 2, max_count=3)
    await gateway.turn()
    assert (await api.get("/stats")).json()["worker_sets"] == {"sets": 1, "wanted": 2, "running": 2}
    metrics = (await api.get("/metrics")).text
    assert 'gpubroker_workers{state="running"} 2.0' in metrics
    assert 'gpubroker_workers{state="wanted"} 2.0' in metrics


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
    await gateway.turn()
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
    await gateway.hear(Gone(task.id, task.fence, now, Proof.PROCESS_ABSENT))
    await gateway.turn()
    assert gateway.world.worker_sets == {}
    told = (await api.get(path)).json()
    assert (told["state"], told["workers"]) == ("over", [])
    assert (await api.delete(path)).status_code == 200


async def test_another_tenant_sees_no_set(gateway: Gateway, api: Client) -> None:
    seen = await formed(gateway, api)
    other = await gateway.client("eve", "tasks:read", "tasks:write", tenant="acme")
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/call")):
        body: dict[str, Any] = {"json": {"method": "add"}} if path else {}
        answer = await other.request(method, f"/worker-sets/{seen['id']}{path}", **body)
        assert answer.status_code == 404, path
    assert (await other.get("/worker-sets")).json()["items"] == []


async def test_a_worker_alone_cannot_be_submitted_again(gateway: Gateway, api: Client) -> None:
    seen = await formed(gateway, api)
    await api.delete(f"/worker-sets/{seen['id']}")
    answer = await api.post(f"/tasks/{seen['id']}/retry")
    assert answer.json()["code"] == "task-not-retryable"


async def test_sets_are_listed_page_by_page_oldest_first(gateway: Gateway, api: Client) -> None:
    made = [(await formed(gateway, api))["id"] for _ in range(3)]
    first = (await api.get("/worker-sets?limit=2")).json()
    assert ([it["id"] for it in first["items"]], first["has_more"]) == (made[:2], True)
    path = f"/worker-sets?cursor={first['next_cursor']}"
    rest = (await api.get(path)).json()
    assert ([it["id"] for it in rest["items"]], rest["next_cursor"]) == (made[2:], None)
    other = await gateway.client("eve", "tasks:read", tenant="acme")
    assert (await other.get(path)).json()["code"] == "cursor-invalid"


@pytest.mark.parametrize(("sort", "expected"), [("-created", "dcba"), ("count", "bdac"), ("-count", "cadb")])
async def test_sets_are_sorted_page_by_page_as_asked(
    gateway: Gateway, api: Client, sort: str, expected: str
) -> None:
    for name, count in zip("abcd", (2, 1, 3, 1), strict=True):
        await formed(gateway, api, name=name, count=count)
    page = (await api.get("/worker-sets", params={"sort": sort, "limit": 1})).json()
    rest = {"sort": sort, "cursor": page["next_cursor"]}
    found = page["items"] + (await api.get("/worker-sets", params=rest)).json()["items"]
    assert "".join(one["name"] for one in found) == expected
    mixed = await api.get("/worker-sets", params={**rest, "sort": "created"})
    assert mixed.json()["code"] == "cursor-invalid"


async def test_the_objects_that_the_set_and_its_roles_name_are_kept_with_it(
    gateway: Gateway, api: Client
) -> None:
    ids = [(await api.post("/objects", content=part)).json()["id"] for part in (b"a", b"b")]
    own, role = ({**RUN, "kwargs": {"weights": {"object": id}}} for id in ids)
    seen = await formed(gateway, api, run=own, colocate_with={"judge": {"run": role}})
    kept = json.loads(await gateway.store.batch_answer(TaskId(seen["id"])))
    assert kept["objects"] == sorted(ids)


async def test_arguments_of_roles_are_bounded_and_name_objects_that_are_there(api: Client) -> None:
    def judge(*args: Any) -> dict[str, Any]:
        run = {"entrypoint": "myteam.solvers:Judge", "args": list(args)}
        return {"run": RUN, "colocate_with": {"judge": {"run": run}}}

    long = (await api.post("/worker-sets", json=judge("x" * 40_000))).json()
    assert [(it["pointer"], it["code"]) for it in long["errors"]] == [("/colocate_with", "too-long")]
    missing = (await api.post("/worker-sets", json=judge({"object": "0" * 64}))).json()
    assert [it["pointer"] for it in missing["errors"]] == ["/colocate_with/judge/run/args/0"]
