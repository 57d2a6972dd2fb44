"""POST /plan: whether components fit one of three described fleets, or the present one."""

import asyncio
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from gpubroker_server.core.domain.orders import Ready, Started
from gpubroker_server.core.explain.fit import FleetPlanSteps, plan_fleet

from tests.builders import GIB
from tests.gateway.harness import Client, Gateway, fault, problem

EXAMPLES = Path(__file__).parents[2] / "examples"

TRAINING = [
    {"name": "rollout", "count": 8, "resources": {"cpu": 1}},
    {"name": "trainer", "count": 1, "resources": {"cpu": 4, "gpus": 1}},
    {"name": "pool", "count": 2, "resources": {"cpu": 1}},
    {"name": "loader", "count": 2, "resources": {"cpu": 1}},
]


def machines(name: str, count: int, cpu: int, gpus: int) -> dict[str, Any]:
    cards = [{"kind": "H100", "memory_mb": 80 * GIB, "count": gpus}] if gpus else []
    return {"name": name, "count": count, "cpu": cpu, "gpus": cards}


async def plan(api: Client, components: list[dict[str, Any]], *fleet: dict[str, Any]) -> dict[str, Any]:
    response = await api.post("/plan", json={"components": components, **({"fleet": fleet} if fleet else {})})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def test_machine_with_one_gpu_takes_a_small_training_but_no_second_trainer(
    api: Client,
) -> None:
    small = machines("small", 1, 16, 1)
    found = await plan(api, TRAINING, small)
    assert (found["fits"], found["message"]) == (True, "it fits")
    assert found["totals"] == {"gpus": 1, "whole_gpus": 1, "gpu_mb": 0, "cpu": 16.0, "memory_mb": 0}
    assert {place["node"] for place in found["places"]} == {"small"}
    two = [{**part, "count": 2} if part["name"] == "trainer" else part for part in TRAINING]
    found = await plan(api, two, small)
    assert (found["fits"], found["message"]) == (
        False,
        "it does not fit: there is no place for 1 of trainer; missing: at least 1 whole GPU, 4 CPUs",
    )
    assert found["missing"] == {
        "gpus": [{"kinds": [], "whole_gpus": 1, "gpu_mb": 0}],
        "cpu": 4.0,
        "memory_mb": 0,
    }
    assert found["components"][1] == {
        "name": "trainer",
        "count": 2,
        "placed": 1,
        "missing": 1,
        "reason": "WaitingForMemory",
        "message": "needs a whole GPU; the largest free block is 0.0 GiB (small/gpu0)",
    }


async def test_four_machines_of_two_gpus_take_a_trainer_for_each_gpu(api: Client) -> None:
    trainers = {"name": "trainer", "count": 8, "resources": {"cpu": 4, "gpus": 1}}
    rollouts = {"name": "rollout", "count": 96, "resources": {"cpu": 1}}
    found = await plan(api, [rollouts, trainers], machines("node", 4, 32, 2))
    assert (found["fits"], found["totals"]["cpu"]) == (True, 128.0)
    per_node = [place["node"] for place in found["places"] if place["component"] == "trainer"]
    assert sorted(per_node) == sorted(["node1", "node2", "node3", "node4"] * 2)
    more = {**rollouts, "count": 97}
    assert (await plan(api, [more, trainers], machines("node", 4, 32, 2)))["components"][0]["missing"] == 1


async def test_large_fleet_is_planned_with_and_without_colocation(
    api: Client,
) -> None:
    """The fleet has eight machines of eight GPUs and 16 of CPUs."""
    fleet = (machines("gpu", 8, 32, 8), machines("cpu", 16, 64, 0))
    roles = {
        "train": {"cpu": 4, "gpus": 1},
        "rollout": {"cpu": 2, "gpus": 1},
        "validate": {"gpu_mb": 20 * GIB},
    }
    together = {"name": "worker", "count": 64, "resources": {"roles": roles}}
    rollouts = {"name": "actors", "count": 1024, "resources": {"cpu": 1}}
    found = await plan(api, [together, rollouts], *fleet)
    assert found["fits"]
    assert (found["totals"]["gpus"], found["totals"]["whole_gpus"], found["totals"]["cpu"]) == (
        64,
        64,
        1280.0,
    )
    apart = found["totals_without_colocation"]
    assert (apart["gpus"], apart["whole_gpus"], apart["gpu_mb"]) == (192, 128, 64 * 20 * GIB)
    assert apart["cpu"] == 64 * 6 + 1024
    alone = [{"name": name, "count": 64, "resources": size} for name, size in roles.items()]
    found = await plan(api, [*alone, rollouts], *fleet)
    assert (found["fits"], sum(part["missing"] for part in found["components"])) == (False, 128)


def totals(gpus: int, whole: int, gpu_mb: int, cpu: int, memory_mb: int = 0) -> dict[str, Any]:
    return {"gpus": gpus, "whole_gpus": whole, "gpu_mb": gpu_mb, "cpu": cpu, "memory_mb": memory_mb}


def apart(component: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Its roles as components of their own, with its priority."""
    roles = component.get("resources", {}).get("roles")
    if roles is None:
        yield component
    for name, size in (roles or {}).items():
        yield {**component, "name": f"{component['name']}-{name}", "resources": size}


@pytest.mark.parametrize(
    ("name", "fleet", "together", "alone", "without_place"),
    [
        ("fleet-small", [(1, 16, 1)], totals(1, 1, 0, 16), totals(1, 1, 0, 17), {"weight-sync": 1}),
        (
            "fleet",
            [(4, 32, 2)],
            totals(8, 6, 2 * 60_000, 128),
            totals(10, 6, 2 * 100_000, 130),
            {"scorer-reward": 2},
        ),
        (
            "fleet-large",
            [(8, 32, 8), (16, 64, 0)],
            totals(80, 80, 0, 64 * 4 + 960 + 64 + 32, (64 * 64 + 960 * 2 + 16 * 64) * 1024),
            totals(208, 144, 64 * 20 * 1024, 64 * 7 + 960 + 64 + 32, (64 * 112 + 960 * 2 + 16 * 64) * 1024),
            {"worker-generate": 64, "worker-validate": 64, "evaluation": 2},
        ),
    ],
)
async def test_the_example_fleets_have_these_totals_and_need_colocation(
    api: Client,
    name: str,
    fleet: list[tuple[int, int, int]],
    together: dict[str, Any],
    alone: dict[str, Any],
    without_place: dict[str, int],
) -> None:
    text = (EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8")
    example = yaml.safe_load(text)
    sizes = [
        (nodes.get("count", 1), nodes["cpu"], sum(gpu.get("count", 1) for gpu in nodes.get("gpus", [])))
        for nodes in example["fleet"]
    ]
    assert sizes == fleet
    found = await plan(api, example["components"], *example["fleet"])
    assert [found["message"]] == re.findall(r"^# -> (.*)$", text, re.MULTILINE)
    assert (found["totals"], found["totals_without_colocation"]) == (together, alone)
    parts = [part for component in example["components"] for part in apart(component)]
    found = await plan(api, parts, *example["fleet"])
    assert found["totals"] == found["totals_without_colocation"] == alone
    assert {part["name"]: part["missing"] for part in found["components"] if part["missing"]} == without_place


async def test_present_fleet_is_planned_with_its_runs_and_the_displaced_ones(
    gateway: Gateway, api: Client
) -> None:
    holder = await api.submit(resources={"gpu_mb": 60 * GIB}, priority=20)
    await gateway.admit(holder)
    gateway.clock.advance(1.0)
    before = await gateway.store.head()
    beside = await plan(api, [{"name": "a", "count": 2, "resources": {"gpu_mb": 10 * GIB}}])
    assert (beside["message"], beside["displaced"]) == ("it fits", [])
    found = await plan(api, [{"name": "a", "count": 3, "resources": {"gpu_mb": 20 * GIB}, "priority": 50}])
    assert (found["fits"], found["message"]) == (True, "it fits if 1 run leaves")
    assert [run["id"] for run in found["displaced"]] == [holder]
    assert [place["displaces"] for place in found["places"]] == [0, 1, 0]
    many = await plan(api, [{"name": "a", "count": 3, "resources": {"gpu_mb": 20 * GIB}, "priority": 20}])
    assert (many["fits"], many["components"][0]["missing"]) == (False, 2)
    assert (gateway.task(holder).state.value, await gateway.store.head()) == ("running", before)


GANG = {"bundles": [{"count": 2, "gpu_mb": 40 * GIB}, {"cpu": 2}], "strategy": "strict_spread"}


async def test_gangs_are_planned_whole_and_each_rank_has_its_place(api: Client) -> None:
    gang = {"name": "ring", "count": 2, "resources": GANG}
    found = await plan(api, [gang], machines("node", 3, 8, 1))
    assert (found["fits"], found["totals"]["gpus"], found["totals"]["gpu_mb"]) == (True, 4, 160 * GIB)
    told = [(place["number"], place["rank"], place["node"]) for place in found["places"]]
    assert [(number, rank) for number, rank, _ in told] == [(n, r) for n in (0, 1) for r in (0, 1, 2)]
    assert all(len({node for number, _, node in told if number == n}) == 3 for n in (0, 1))
    found = await plan(api, [{**gang, "count": 4}], machines("node", 3, 8, 1))
    [ring] = found["components"]
    assert (ring["placed"], ring["missing"], len(found["places"])) == (3, 1, 9)
    assert ring["message"].startswith(
        "there is room for none of the 3 ranks that must start together; rank 0:"
    )
    assert found["missing"]["gpus"] == [{"kinds": [], "whole_gpus": 0, "gpu_mb": 80 * GIB}]


async def test_a_gang_with_min_ranks_gives_up_only_spare_ranks(gateway: Gateway, api: Client) -> None:
    ranks = {"bundles": [{"count": 2, "gpu_mb": 40 * GIB}], "min_ranks": 1}
    gang = await api.submit(resources=ranks, priority=10)
    await gateway.plan(gang)
    task, now = gateway.task(gang), gateway.clock.now()
    await gateway.hear(
        *(Started(task.id, task.fence, now, pid=1, rank=rank) for rank in (0, 1)),
        *(Ready(task.id, task.fence, now, "10.0.0.1:4000", rank) for rank in (0, 1)),
    )
    gateway.clock.advance(1.0)
    new = {"name": "new", "resources": {"gpu_mb": 20 * GIB}, "priority": 50}
    found = await plan(api, [new])
    assert found["message"] == "it fits if 1 gang gives up 1 rank"
    [run] = found["displaced"]
    assert (run["id"], run["ranks"], run["gpu_mb"]) == (gang, [1], 40 * GIB)
    found = await plan(api, [{**new, "resources": {"gpu_mb": 60 * GIB}}])
    assert found["message"] == "it fits if 1 run leaves"


async def test_an_invalid_component_is_refused_with_its_pointer(gateway: Gateway, api: Client) -> None:
    async def refused(*components: dict[str, Any], **more: Any) -> httpx.Response:
        return await api.post("/plan", json={"components": components, **more})

    part = {"name": "a", "count": 2000, "resources": {"cpu": 1}}
    assert "at most 2000" in fault(await refused(part, {**part, "name": "b"}), "/components")
    ranks = {"name": "a", "count": 1000, "resources": {"bundles": [{"count": 3, "cpu": 1}]}}
    assert "at most 2000" in fault(await refused(ranks), "/components")
    assert "different names" in fault(await refused({"name": "a"}, {"name": "a"}), "")
    fault(await refused(), "/components")
    strange = {"name": "a", "resources": {"pool": "none", "gpus": 1}}
    refusal = problem(await refused({"name": "b"}, strange), 422, "pool-mismatch")
    assert [found["pointer"] for found in refusal["errors"]] == ["/components/1/resources/pool"]
    reader = await gateway.client("reader", "tasks:read")
    problem(await reader.post("/plan", json={"components": [part]}), 403, "forbidden")


async def test_a_plan_needs_a_priority_that_the_token_could_submit_with(gateway: Gateway) -> None:
    capped = await gateway.client("capped", max_priority=50)
    parts = [{"name": "a", "priority": 50}, {"name": "b", "priority": 51}]
    refusal = problem(await capped.post("/plan", json={"components": parts}), 403, "priority-not-allowed")
    assert [found["pointer"] for found in refusal["errors"]] == ["/components/1/priority"]
    low = await gateway.client("low", max_priority=40)
    assert (await low.post("/plan", json={"components": [{"name": "a"}]})).status_code == 200


async def test_quotas_and_limits_count_on_a_described_fleet_only_with_a_tenant(
    gateway: Gateway,
) -> None:
    acme = await gateway.client("acme", "cluster:read", tenant="acme")
    part = {"name": "a", "count": 2, "resources": {"gpu_mb": 40 * GIB}, "labels": {"run": "x"}}
    asked = {"components": [part], "fleet": [machines("big", 1, 8, 4)]}
    found = (await acme.post("/plan", json=asked)).json()
    assert found["fits"]
    [named] = (await acme.post("/plan", json={**asked, "tenant": "acme"})).json()["components"]
    assert (named["reason"], named["missing"]) == ("QuotaExhausted", 2)
    [here] = (await acme.post("/plan", json={"components": [part]})).json()["components"]
    assert (here["reason"], here["missing"]) == ("QuotaExhausted", 2)
    limited = {**part, "resources": {"cpu": 1}}
    [limit] = (await acme.post("/plan", json={**asked, "components": [limited], "tenant": "acme"})).json()[
        "components"
    ]
    assert (limit["reason"], limit["missing"]) == ("ConcurrencyLimited", 1)
    other = await acme.post("/plan", json={**asked, "tenant": "zeta"})
    assert problem(other, 403, "forbidden")["errors"][0]["pointer"] == "/tenant"
    assert (await gateway.admin.post("/plan", json={**asked, "tenant": "zeta"})).status_code == 200


async def test_an_admin_plans_for_known_tenants_within_their_caps(gateway: Gateway) -> None:
    await gateway.client("newcomer", tenant="newcomer")
    asked = {"components": [{"name": "a", "priority": 70}], "fleet": [machines("big", 1, 8, 0)]}

    async def named(tenant: str) -> httpx.Response:
        return await gateway.admin.post("/plan", json={**asked, "tenant": tenant})

    assert 'did you mean "zeta"?' in fault(await named("zetta"), "/tenant")
    assert (await named("newcomer")).status_code == 200
    capped = problem(await named("modest"), 403, "priority-not-allowed")
    assert 'above 69, the cap of tenant "modest"' in capped["detail"]


async def test_component_a_submit_would_refuse_does_not_fit_for_a_given_reason(
    api: Client,
) -> None:
    large = {"name": "large", "resources": {"memory_mb": 200 * GIB}}
    seated = {"name": "seated", "priority": 69, "resources": {"custom": {"seat": 1}}}
    for part, why in (
        (large, f"memory_mb {200 * GIB}: one task may have at most {128 * GIB} here"),
        (seated, "'seat' is for tasks of priority 70 and above"),
    ):
        found = await plan(api, [part], machines("node", 2, 8, 0))
        assert (found["fits"], found["components"][0]["reason"]) == (False, "ExceedsCapacity")
        assert found["message"].startswith(
            f"it does not fit: there is no place for 1 of {part['name']}; {why}"
        )
    assert (await plan(api, [{**seated, "priority": 70}], machines("node", 2, 8, 0)))["fits"]


async def test_described_nodes_have_the_custom_resources_of_every_node(api: Client) -> None:
    part = {"name": "a", "count": 3, "resources": {"cpu": 1, "custom": {"fpga": 1}}}
    found = await plan(api, [part], machines("node", 1, 8, 0))
    assert (found["components"][0]["placed"], found["components"][0]["reason"]) == (2, "ConcurrencyLimited")
    assert (await plan(api, [part], machines("node", 2, 8, 0)))["fits"]


@pytest.mark.parametrize(
    ("component", "pointer", "says"),
    [
        ({"resources": {"gpu_memory": 1}}, "resources/gpu_memory", 'did you mean "gpu_mb"?'),
        ({"resources": {"gpu_mb": "40GiB"}}, "resources/gpu_mb", 'found "40GiB"; in MiB that is 40960'),
        ({"resources": {"memory_mb": "1.5 TB"}}, "resources/memory_mb", "in MiB that is 1430512"),
        ({"resources": {"gpu_mb": "24GB"}}, "resources/gpu_mb", 'found "24GB"; in MiB that is 22889'),
        ({"resources": {"bundles": [{"gpu": 1}]}}, "resources/bundles/0/gpu", 'did you mean "gpus"?'),
        ({"resources": {"roles": {"x": {"cpus": 1}}}}, "resources/roles/x/cpus", 'did you mean "cpu"?'),
        ({"count": 0}, "count", "must be at least 1; found 0"),
        ({"run": {"command": ["x"]}}, "run", "unknown field"),
        ({"priority": "high"}, "priority", "one of"),
        ({"name": "my part"}, "name", 'dashes and underscores, at most 63; found "my part"'),
        ({"resources": {"gpus": 0.5}}, "resources/gpus", "found 0.5; for a part of a GPU"),
        ({"resources": {"bundles": {"cpu": 1}}}, "resources/bundles", "must be a list; found an object"),
    ],
)
async def test_faults_have_a_pointer_what_was_found_and_what_to_do(
    api: Client, component: dict[str, Any], pointer: str, says: str
) -> None:
    response = await api.post("/plan", json={"components": [{"name": "ok"}, {"name": "a", **component}]})
    assert says in fault(response, f"/components/1/{pointer}")


async def test_an_unknown_kind_is_refused_with_the_kinds_of_the_fleet(api: Client) -> None:
    part = {"name": "a", "resources": {"gpus": 1, "kinds": ["H200"]}}
    [found] = (await plan(api, [part], machines("node", 1, 8, 2)))["components"]
    assert (found["reason"], found["missing"]) == ("NoMatchingDevice", 1)
    assert "H100" in found["message"]


async def test_a_fleet_that_is_too_large_is_refused(api: Client) -> None:
    nodes = [{"name": f"rack{number}", "count": 600, "cpu": 8} for number in range(2)]
    body = {"components": [{"name": "a"}], "fleet": nodes}
    refusal = problem(await api.post("/plan", json=body), 422, "validation-failed")
    assert "at most 1000 nodes and 10000 GPUs" in str(refusal["errors"])


async def test_other_requests_are_answered_while_a_plan_is_computed(
    api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_go_on = threading.Event(), threading.Event()

    def slowly(*asked: Any) -> FleetPlanSteps:
        began.set()
        assert may_go_on.wait(10.0)
        return (yield from plan_fleet(*asked))

    monkeypatch.setattr("gpubroker_server.gateway.explain.plan_routes.plan_fleet", slowly)
    part = {"components": [{"name": "a", "resources": {"cpu": 1}}]}
    answer = asyncio.ensure_future(api.post("/plan", json=part))
    assert await asyncio.to_thread(began.wait, 10.0)
    task = await api.submit(resources={"gpu_mb": GIB})
    assert (await api.get(f"/tasks/{task}")).status_code == 200
    may_go_on.set()
    assert (await answer).json()["fits"]


async def test_a_plan_that_takes_too_long_is_refused(api: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpubroker_server.gateway.explain.plan_routes.LIMIT_SECONDS", 0.0)
    body = {"components": [{"name": "a", "count": 2, "resources": {"cpu": 1}}]}
    refusal = problem(await api.post("/plan", json=body), 422, "validation-failed")
    assert "ask about fewer tasks at a time" in str(refusal["errors"])
