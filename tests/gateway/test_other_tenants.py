"""An operator with the scope admin sees and ends any tenant's work, which is audited; nobody else does."""

from tests.gateway.harness import Client, Gateway, fault, problem


async def a_task_of(gateway: Gateway, tenant: str) -> tuple[Client, str]:
    owner = await gateway.client(f"of-{tenant}", "tasks:read", "tasks:write", tenant=tenant)
    return owner, await owner.submit(name=f"work-{tenant}", labels={"team": tenant})


def names(listed: dict[str, object]) -> list[tuple[object, object]]:
    items = listed["items"]
    assert isinstance(items, list)
    return [(item["tenant"], item["name"]) for item in items]


async def test_an_admin_lists_the_tasks_of_one_other_tenant_and_of_all(gateway: Gateway) -> None:
    for tenant in ("vision", "speech"):
        await a_task_of(gateway, tenant)
    olga = await gateway.client("olga", "admin", "tasks:read", tenant="ops")
    assert names((await olga.get("/tasks")).json()) == []
    assert names((await olga.get("/tasks?tenant=vision")).json()) == [("vision", "work-vision")]
    every = (await olga.get("/tasks?tenant=*&limit=1")).json()
    assert names(every) == [("speech", "work-speech")]
    rest = (await olga.get("/tasks", params={"tenant": "*", "cursor": every["next_cursor"]})).json()
    assert names(rest) == [("vision", "work-vision")]
    chosen = await olga.get("/tasks", params={"tenant": "*", "label.team": "vision"})
    assert names(chosen.json()) == [("vision", "work-vision")]


async def test_admin_sees_and_ends_a_task_of_another_tenant_and_it_is_audited(gateway: Gateway) -> None:
    _, task = await a_task_of(gateway, "vision")
    olga = await gateway.client("olga", "admin", "tasks:read", "tasks:write", tenant="ops")
    for path in ("", "/explain", "/events"):
        assert (await olga.get(f"/tasks/{task}{path}")).status_code == 200
    assert gateway.store.audited() == []
    assert (await olga.patch(f"/tasks/{task}", json={"priority": 5})).status_code == 200
    assert (await olga.post(f"/tasks/{task}/cancel")).status_code == 202
    assert [(note.actor, note.tenant, note.action, note.subject) for note in gateway.store.audited()] == [
        ("olga", "vision", "task.change", task),
        ("olga", "vision", "task.cancel", task),
    ]


async def test_admin_releases_a_lease_of_another_tenant_and_that_is_audited(
    gateway: Gateway,
) -> None:
    vision = await gateway.client("v", tenant="vision")
    lease = (await vision.post("/leases", json={"holder": "notebook", "gpu_mb": 1024})).json()["id"]
    olga = await gateway.client("olga", "admin", "tasks:read", "tasks:write", tenant="ops")
    assert (await olga.get("/leases")).json()["items"] == []
    for whose in ("vision", "*"):
        [seen] = (await olga.get(f"/leases?tenant={whose}&holder=notebook")).json()["items"]
        assert (seen["id"], seen["tenant"]) == (lease, "vision")
    assert gateway.store.audited() == []
    await olga.post(f"/leases/{lease}/renew")
    await olga.delete(f"/leases/{lease}")
    notes = [(note.actor, note.tenant, note.action, note.subject) for note in gateway.store.audited()]
    assert notes == [
        ("olga", "vision", "lease.renew", lease),
        ("olga", "vision", "lease.release", lease),
    ]
    stranger = await gateway.client("s", "tasks:read", tenant="speech")
    refused = problem(await stranger.get("/leases?tenant=*"), 403, "forbidden")
    assert "a list of other tenants' leases" in refused["detail"]


async def test_the_id_of_any_worker_finds_its_array_and_its_worker_set(gateway: Gateway) -> None:
    run = {"entrypoint": "myteam.training:train"}
    api = gateway.admin
    array = (await api.post("/arrays", json={"run": run, "items": [1, 2, 3], "max_parallel": 3})).json()
    formed = (await api.post("/worker-sets", json={"run": run, "count": 2, "max_count": 3})).json()
    await gateway.turn()
    for worker in (it["id"] for it in array["workers"]):
        assert (await api.get(f"/arrays/{worker}")).json()["id"] == array["id"]
    for worker in (it["id"] for it in formed["workers"]):
        assert (await api.get(f"/worker-sets/{worker}")).json()["id"] == formed["id"]
    stranger = await gateway.client("s", "tasks:read", tenant="speech")
    problem(await stranger.get(f"/arrays/{array['workers'][1]['id']}"), 404, "not-found")
    problem(await stranger.get(f"/worker-sets/{formed['workers'][1]['id']}"), 404, "not-found")
    alone = await api.submit()
    said = problem(await api.get(f"/arrays/{alone}"), 404, "not-found")["detail"]
    assert said == f"task {alone} is no worker of an array"


async def test_others_see_and_end_only_what_is_their_tenants(gateway: Gateway) -> None:
    _, task = await a_task_of(gateway, "vision")
    other, own = await a_task_of(gateway, "speech")
    assert names((await other.get("/tasks?tenant=speech")).json()) == [("speech", "work-speech")]
    for named in ("vision", "*"):
        assert "scope admin" in problem(await other.get(f"/tasks?tenant={named}"), 403, "forbidden")["detail"]
    problem(await other.get(f"/tasks/{task}"), 404, "not-found")
    problem(await other.post(f"/tasks/{task}/cancel"), 404, "not-found")
    await other.post(f"/tasks/{own}/cancel")
    assert gateway.store.audited() == [], "one's own needs no note"


async def test_token_for_an_unknown_tenant_is_refused_unless_the_tenant_is_new(
    api: Client,
) -> None:
    """The refusal names the nearest tenant."""
    wish = {"name": "ci", "scopes": ["tasks:read"], "tenant": "acmee"}
    refused = await api.post("/tokens", json=wish)
    assert 'did you mean "acme"?' in fault(refused, "/tenant")
    assert "new_tenant: true" in fault(refused, "/tenant")
    assert "known are acme" in fault(await api.post("/tokens", json={**wish, "tenant": "q"}), "/tenant")
    assert (await api.post("/tokens", json={**wish, "new_tenant": True})).status_code == 201
    assert (await api.post("/tokens", json={**wish, "name": "more"})).status_code == 201, "it is known now"
    assert (await api.post("/tokens", json={**wish, "name": "z", "tenant": "zeta"})).status_code == 201
