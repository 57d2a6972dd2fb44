"""What is wrong with the fleet, as each caller may see it."""

from typing import Any

import httpx
import pytest
from gpubroker_server.adapters.triton.http_backend import HttpBackend, TritonServer
from gpubroker_server.core.control.finding_dates import FindingDate
from gpubroker_server.core.control.findings.finding import MAX_OF_A_KIND
from gpubroker_server.core.control.findings.work import StuckTask
from gpubroker_server.core.control.fleet import FleetSeen
from gpubroker_server.core.control.idle import Idle
from gpubroker_server.core.domain.orders import NodeLost
from gpubroker_server.core.domain.policy import TenantPolicy
from gpubroker_server.core.domain.server_rules import ServerRules
from gpubroker_server.core.domain.units import Instant, Mib, NodeName
from gpubroker_server.core.lifecycle.silent_nodes import PausedDetection
from gpubroker_server.gateway.cluster.diagnostics import longest_waiting, quota_locks, stuck_task
from gpubroker_server.http.times import rfc3339
from gpubroker_server.inference.protocols.triton.checks import TRITON
from gpubroker_server.inference.servers import Server
from gpubroker_server.ports.backends import Trouble
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_demand, a_device, a_node, a_sample, a_task, key
from tests.gateway.harness import Client, Gateway
from tests.simulated_host import SimulatedHost, SimulatedModel


async def diagnosed(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await client.get("/diagnostics")).json()["items"]
    return found


def stuck_tasks(gateway: Gateway, waited_seconds: float = 601.0) -> list[StuckTask]:
    waiting = longest_waiting(gateway.world, Instant(NOW + waited_seconds), lambda tenant: True)
    found = (stuck_task(task, gateway.world, gateway.policy) for task in waiting)
    return [one for one in found if one is not None]


async def test_a_fleet_that_works_has_no_findings(api: Client) -> None:
    assert await diagnosed(api) == []


async def test_finding_has_cause_evidence_remedy_and_the_age_of_what_it_found(
    gateway: Gateway, api: Client
) -> None:
    task = await api.submit(resources={"gpu_mb": 1024}, name="train")
    await gateway.admit(task)
    gateway.fleet = FleetSeen(idle=(Idle(key("gpu0"), 0.01, Instant(NOW - 50.0)),))
    gateway.clock.advance(400.0)
    [found] = await diagnosed(api)
    assert (found["kind"], found["subject"], found["severity"]) == (
        "gpu-held-unasked", "n1/gpu0 train", "warning",
    )  # fmt: skip
    assert (found["remedy"], found["evidence"]["held_mb"]) == (f"gpubroker cancel {task}", 1024)
    assert found["first_seen_at"] == (await api.get(f"/tasks/{task}")).json()["admitted_at"]


async def test_findings_about_tasks_of_others_are_for_admins(gateway: Gateway) -> None:
    acme = await gateway.client("a", tenant="acme")
    operator = await gateway.client("o", "cluster:read", tenant="zeta")
    await gateway.admit(await acme.submit(resources={"gpu_mb": 1024}))
    gateway.fleet = FleetSeen(idle=(Idle(key("gpu0"), 0.01, Instant(NOW)),))
    gateway.clock.advance(400.0)
    assert [one["kind"] for one in await diagnosed(gateway.admin)] == ["gpu-held-unasked"]
    assert await diagnosed(operator) == []
    assert (await (await gateway.client("p", "tasks:read")).get("/diagnostics")).status_code == 403


async def test_tenant_is_told_of_its_own_tasks_however_many_others_have_findings(
    gateway: Gateway,
) -> None:
    acme = await gateway.client("a", tenant="acme")
    zeta = await gateway.client("z", "tasks:read", "tasks:write", "cluster:read", tenant="zeta")
    for _ in range(MAX_OF_A_KIND):
        await gateway.admit(await acme.submit(resources={"gpu_mb": 1024}))
    await gateway.admit(await zeta.submit(resources={"gpu_mb": 1024}, name="mine"))
    gateway.fleet = FleetSeen(idle=(Idle(key("gpu0"), 0.01, Instant(NOW)),))
    gateway.clock.advance(400.0)
    assert [one["subject"] for one in await diagnosed(zeta)] == ["n1/gpu0 mine"]
    assert len(await diagnosed(gateway.admin)) == MAX_OF_A_KIND


async def test_worst_finding_is_first_and_an_undated_one_is_as_old_as_its_answer(
    gateway: Gateway, api: Client
) -> None:
    """Its age counts from the first answer that had it."""
    gateway.executor = {**gateway.executor, "agents": {"n1": {"outdated": True}}}
    [first] = await diagnosed(api)
    gateway.has_leader = False
    gateway.clock.advance(60.0)
    leader, agent = await diagnosed(api)
    assert (leader["kind"], agent) == ("no-leader", first)
    assert leader["first_seen_at"] > agent["first_seen_at"]


async def test_finding_is_as_old_as_the_leader_says_if_this_gateway_never_looked(
    gateway: Gateway, api: Client
) -> None:
    gateway.executor = {**gateway.executor, "agents": {"n1": {"outdated": True}}}
    gateway.fleet = FleetSeen(dates=(FindingDate("agent-outdated", "n1", Instant(NOW - 500.0)),), at=NOW)
    [found] = await diagnosed(api)
    assert found["first_seen_at"] == rfc3339(Instant(NOW - 500.0))
    gateway.has_leader = False
    gateway.clock.advance(60.0)
    gone, found = await diagnosed(api)
    assert (gone["kind"], gone["first_seen_at"]) == ("no-leader", rfc3339(NOW))
    assert found["first_seen_at"] == rfc3339(Instant(NOW - 500.0))


@pytest.mark.provokes("node-closed", "queue-paused")
async def test_closed_nodes_and_paused_queues_are_found(gateway: Gateway, api: Client) -> None:
    await api.submit(resources={"gpu_mb": 1024})
    await api.post("/nodes/n1/cordon", json={"reason": "a fan"})
    await api.post("/tenants/default/pause", json={"reason": "moving"})
    closed_at = gateway.clock.now()
    gateway.clock.advance(100.0)
    await api.post("/nodes/n1/cordon", json={"reason": "still"})
    closed, paused = sorted(await diagnosed(api), key=lambda one: str(one["kind"]))
    assert closed["cause"] == "n1 is cordoned by admin (still): nothing new starts there."
    assert paused["cause"] == "The queue of tenant default is paused by admin (moving): 1 tasks wait."
    assert [one["first_seen_at"] for one in (closed, paused)] == [rfc3339(closed_at)] * 2
    other = await gateway.client("o", "cluster:read", tenant="zeta")
    assert [one["kind"] for one in await diagnosed(other)] == ["node-closed"]


@pytest.mark.provokes("model-server-misplaced")
async def test_server_without_a_place_for_its_models_is_found(gateway: Gateway) -> None:
    host = SimulatedHost("main", [SimulatedModel("any")])
    gateway.change(served=[(ServerRules("main", "n7"), host)])
    [found] = await diagnosed(await gateway.client("boss"))
    assert (found["kind"], found["severity"]) == ("model-server-misplaced", "critical")
    assert 'its node "n7" has not joined' in found["cause"]


@pytest.mark.provokes("node-silent", "nodes-held-back")
async def test_silent_nodes_are_found(gateway: Gateway, api: Client) -> None:
    gateway.silent[NodeName("n1")] = Instant(NOW - 20.0)
    gateway.paused_nodes = PausedDetection("all fell silent at once", ("n1",), 1, 1, NOW)
    held_back, late = await diagnosed(api)
    assert (held_back["kind"], held_back["first_seen_at"]) == ("nodes-held-back", rfc3339(NOW))
    assert (late["kind"], late["first_seen_at"]) == ("node-silent", rfc3339(Instant(NOW - 20.0)))


@pytest.mark.provokes("memory-quarantined")
async def test_memory_in_quarantine_is_found_without_the_names_of_its_holders(
    gateway: Gateway, api: Client
) -> None:
    task = await api.submit(resources={"gpu_mb": 1024}, max_retries=0)
    await gateway.admit(task)
    node = gateway.world.nodes[NodeName("n1")]
    await gateway.hear(NodeLost(node.name, node.incarnation, gateway.clock.at, "no beat"))
    found = {
        one["kind"]: one for one in await diagnosed(await gateway.client("o", "cluster:read", tenant="z"))
    }
    assert found["memory-quarantined"]["evidence"] == {"mb": 1024, "holders": 1}
    assert task not in str(found["memory-quarantined"])


@pytest.mark.provokes("guarantee-locks-capacity")
async def test_quota_that_leaves_memory_unused_is_found_while_tasks_wait_for_it(gateway: Gateway) -> None:
    gateway.policy = replace(gateway.policy, tenants=(TenantPolicy("acme", guaranteed_mb=Mib(4096)),))
    world = gateway.world
    world.add_task(a_task("t", gpu_mb=8192, tenant="acme"))
    world.add_task(a_task("free", gpu_mb=8192, tenant="zeta"))
    locks = quota_locks(world, gateway.policy)
    assert [(lock.tenant, lock.tasks) for lock in locks] == [("acme", 1)]
    world.add_task(a_task("u", gpu_mb=2048, tenant="acme"))
    assert [lock.tasks for lock in quota_locks(world, gateway.policy)] == [1], "this one may start"
    world.full_disks[NodeName("n1")] = "/data"
    assert quota_locks(world, gateway.policy) == []


@pytest.mark.provokes("database-log-grows")
async def test_the_log_of_the_database_is_measured_and_found_when_it_is_large(
    gateway: Gateway, api: Client
) -> None:
    assert "gpubroker_database_log_bytes" not in (await api.get("/metrics")).text, "not looked at yet"
    gateway.parts.database_log.look(2**20, NOW)
    gateway.parts.database_log.look(2**30, NOW)
    text = (await api.get("/metrics")).text
    figures = dict(line.split() for line in text.splitlines() if line.startswith("gpubroker_database_log"))
    shown = {name: float(figure) for name, figure in figures.items()}
    assert shown == {
        "gpubroker_database_log_bytes": 2**30,
        "gpubroker_database_log_grown_bytes": 2**30 - 2**20,
    }
    [found] = await diagnosed(api)
    assert (found["kind"], found["first_seen_at"]) == ("database-log-grows", rfc3339(NOW))


async def test_it_is_answered_while_the_database_is_away(gateway: Gateway, api: Client) -> None:
    gateway.age, gateway.full = 100.0, "disk full: /data"
    assert {one["kind"] for one in await diagnosed(api)} == {"database-unreachable", "service-disk-full"}


@pytest.mark.provokes("pending-for-ever")
async def test_a_task_that_no_node_can_run_any_more_says_what_would_let_it_start(
    gateway: Gateway, api: Client
) -> None:
    small = a_device("gpu0", "n2", mb=20 * GIB)
    await gateway.join(small, node=a_node("n2"))
    gateway.world.measure([a_sample(small.key)])
    task = await api.submit(resources={"gpu_mb": 40 * GIB}, name="train")
    await api.submit(resources={"gpu_mb": 2048}, held=True)
    await api.post("/nodes/n1/cordon", json={"reason": "repair"})
    assert [one["kind"] for one in await diagnosed(api)] == ["node-closed"]  # the node may be opened soon
    gateway.clock.advance(601.0)
    gateway.world.measure([a_sample(device, gateway.clock.at) for device in gateway.world.ledgers])
    found, closed = sorted(await diagnosed(api), key=lambda one: str(one["kind"]), reverse=True)
    assert (found["kind"], found["subject"], closed["subject"]) == ("pending-for-ever", task, "n1")
    assert found["cause"].endswith("it fits on n1, which is cordoned (repair)")
    assert found["remedy"] == "gpubroker uncordon n1"
    await api.post("/nodes/n1/uncordon")
    assert await diagnosed(api) == []
    await gateway.admit(task)


@pytest.mark.provokes("all-on-one-node")
async def test_work_bound_to_one_of_two_nodes_is_found_while_a_task_waits(
    gateway: Gateway, api: Client
) -> None:
    await gateway.join(a_device("gpu0", "n2"), node=a_node("n2"))
    gateway.world.measure([a_sample(device, gateway.clock.at) for device in gateway.world.ledgers])
    bound = {"resources": {"gpu_mb": 18 * GIB, "nodes": {"node": ["n1"]}}}
    for _ in range(4):
        await gateway.admit(await api.submit(**bound))
    assert await diagnosed(api) == []
    await api.submit(**bound)
    [found] = await diagnosed(api)
    assert (found["kind"], found["subject"]) == ("all-on-one-node", "n1")
    await gateway.admit(await api.submit(resources={"gpu_mb": 18 * GIB}))
    assert await diagnosed(api) == []


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"gpu_mb": 90 * GIB}, "exceed"),
        ({"gpu_mb": 40 * GIB}, "it fits on n1, which does not answer"),
        (
            {"bundles": (a_demand(gpu_mb=40 * GIB),) * 2, "strategy": "strict_spread"},
            "some of the nodes that it needs take no work",
        ),
    ],
)
async def test_it_says_why_no_open_node_can_run_a_task(
    gateway: Gateway, fields: dict[str, Any], said: str
) -> None:
    world = gateway.world
    for name in ("n1", "n2"):
        world.add_node(a_node(name, ready=False))
        world.add_device(a_device("gpu0", name))
    world.add_task(a_task("t", **fields))
    [found] = stuck_tasks(gateway)
    assert said in found.why
    assert found.remedy == "gpubroker explain t"
    assert stuck_tasks(gateway, 599.0) == []


async def test_task_that_cannot_start_is_found_behind_older_ones_that_can(
    gateway: Gateway,
) -> None:
    for number in range(5):
        gateway.world.add_task(a_task(f"t{number}", gpu_mb=GIB + number, submitted_at=Instant(NOW - 10.0)))
    gateway.world.add_task(a_task("stuck", gpu_mb=90 * GIB))
    assert [one.task.id for one in stuck_tasks(gateway)] == ["stuck"]


@pytest.mark.provokes("node-closed-by-disk")
async def test_a_full_disk_keeps_a_task_waiting_until_there_is_room(gateway: Gateway) -> None:
    gateway.world.full_disks[NodeName("n1")] = "/data"
    gateway.world.add_task(a_task("t", gpu_mb=GIB))
    [found] = stuck_tasks(gateway)
    assert found.why == "it fits on n1, which has a full disk (/data)"
    assert [one["kind"] for one in await diagnosed(gateway.admin)] == ["node-closed-by-disk"]
    gateway.world.full_disks.clear()
    assert stuck_tasks(gateway) == []


async def test_a_model_server_that_does_not_answer_is_found(gateway: Gateway) -> None:
    server = Server("here", HttpBackend(TritonServer("here", "localhost", 1, b"localhost:1")), TRITON)
    gateway.change(servers=(server,))
    while not server.http.breaker.is_open:
        server.http.failed(Trouble.UNREACHABLE, "connection refused")
    [found] = await diagnosed(gateway.admin)
    assert (found["kind"], found["subject"]) == ("model-server-unreachable", "here (http)")
    assert "connection refused" in found["cause"]
