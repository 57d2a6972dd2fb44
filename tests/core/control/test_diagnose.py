"""Each finding about the fleet, from the picture in which it is true; and none from a healthy one."""

from collections.abc import Iterable
from typing import Any

import pytest
from gpubroker_server.core.control.findings.diagnose import FleetKnown, diagnose_fleet
from gpubroker_server.core.control.findings.finding import Finding, Severity
from gpubroker_server.core.control.findings.gpus import held_idle_seconds
from gpubroker_server.core.control.findings.parts import ServerWay
from gpubroker_server.core.control.findings.work import StuckTask
from gpubroker_server.core.control.fleet import FleetSeen
from gpubroker_server.core.control.idle import Idle
from gpubroker_server.core.control.memory_failures import MemoryFailures
from gpubroker_server.core.control.waiting_calls import WaitingCalls
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.device import DiskSample, NodeSample, StoreSample, UnreachedNode
from gpubroker_server.core.domain.holders import External, Gang, Member, Model
from gpubroker_server.core.domain.lease import HolderKind, LeaseState
from gpubroker_server.core.domain.policy import CustomLimit, Policy
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, Seconds, TaskId
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import (
    GIB,
    NOW,
    Holding,
    a_device,
    a_lease,
    a_node,
    a_sample,
    a_task,
    a_world,
    holding,
    key,
)
from tests.core.served import loaded

LATER = Instant(NOW + 1_000.0)
"""By then what has not moved since NOW has been so for long enough."""
WELL = FleetKnown({"state": "connected", "address": "h:6379", "message": ""}, has_leader=True)


POLICY = Policy()


def findings(world: World, policy: Policy = POLICY, **known: Any) -> list[Finding]:
    return list(diagnose_fleet(world, policy, WELL._replace(**known), LATER))


def kinds(found: Iterable[Finding]) -> list[tuple[str, str]]:
    return [(one.kind, one.subject) for one in found]


def node_shows(world: World, name: str = "n1", at: float = LATER, **fields: Any) -> None:
    facts = {"cpu": 0.1, "memory_total_mb": Mib(100), "memory_available_mb": Mib(50), **fields}
    world.node_samples[NodeName(name)] = NodeSample(NodeName(name), Instant(at), **facts)


def idle(*devices: str, since: float = NOW) -> FleetSeen:
    return FleetSeen(idle=tuple(Idle(name, 0.01, Instant(since)) for name in devices))


def test_a_healthy_fleet_has_no_findings() -> None:
    world = a_world(holding(a_task("t", gpu_mb=GIB), "gpu0"), a_task("waits", gpu_mb=GIB))
    node_shows(world, disks=(DiskSample("/", 100, 50),), store=StoreSample(10, 0))
    agents = {"n1": {"python": "3.12.1", "ray": "2.50.0", "outdated": False, "clock_ahead_seconds": 1}}
    assert findings(world, executor={**WELL.executor, "agents": agents}, fleet=idle()) == []


def test_server_without_a_place_for_its_models_is_found() -> None:
    [found] = findings(a_world(), servers_misplaced={"a": "its node n7 has not joined"})
    assert kinds([found]) == [("model-server-misplaced", "a")]
    assert found.cause == "Model server a can load nothing: its node n7 has not joined."


@pytest.mark.parametrize(("utilization", "found"), [(0.0, []), (0.05, [("cpu-bottleneck", "n1")])])
def test_busy_cpus_slow_down_no_model_that_is_asked_nothing(
    utilization: float, found: list[tuple[str, str]]
) -> None:
    world = loaded()
    world.measure([a_sample("gpu0", LATER, utilization=utilization)])
    node_shows(world, cpu=0.99)
    assert [one for one in kinds(findings(world)) if one[0] == "cpu-bottleneck"] == found


def test_a_gpu_whose_holder_computes_nothing_waits_for_work() -> None:
    world = a_world(holding(a_task("t", name="train", tenant="acme"), "gpu0", mb=GIB))
    [found] = findings(world, fleet=idle(key("gpu0"), "n1", "a gpu that is gone"))
    assert kinds([found]) == [("gpu-held-unasked", "n1/gpu0 train")]
    assert (found.remedy, found.tenant, found.first_seen) == ("gpubroker cancel t", "acme", NOW)
    assert found.evidence == {"task": "t", "held_mb": GIB, "used_mb": 0, "utilization": 0.0}


def test_a_holder_that_came_to_an_idle_gpu_has_time_to_prepare() -> None:
    world = a_world(holding(a_task("t"), "gpu0", mb=GIB, admitted_at=Instant(LATER - 200.0)))
    assert findings(world, fleet=idle(key("gpu0"))) == []


def test_moving_runs_server_memory_and_idle_work_do_not_count_as_held() -> None:
    """Runs that come or leave hold nothing for this finding."""
    coming = holding(a_task("coming"), "gpu0", mb=GIB, lease_state=LeaseState.RESERVED)
    leaving = holding(a_task("leaving"), "gpu0", mb=GIB, state=TaskState.STOPPING)
    server = holding(a_task("server"), mb=GIB)
    base = a_lease(server.task, "gpu0", GIB)
    fill = holding(a_task("fill", priority=5), "gpu0", mb=GIB)
    world = a_world(coming, leaving, server, fill)
    world.add_lease(replace(base, holder_kind=HolderKind.SERVER))
    assert findings(world, fleet=idle(key("gpu0"))) == []


def test_a_model_that_nobody_asks_can_be_unloaded() -> None:
    model = a_task("m", name="llama", holder=Model("here", "llama"))
    [found] = findings(a_world(holding(model, "gpu0", mb=GIB)), fleet=idle(key("gpu0")))
    assert (found.kind, found.remedy) == ("gpu-held-unasked", "gpubroker unload llama")


def test_a_lease_of_another_program_is_released_by_its_holder() -> None:
    held = a_task("l", holder=External(Seconds(60.0)))
    [found] = findings(a_world(holding(held, "gpu0", mb=GIB)), fleet=idle(key("gpu0")))
    assert (found.kind, found.remedy) == ("gpu-held-unasked", "gpubroker lease release l")


def test_a_process_on_a_gpu_that_it_did_not_lease_chose_the_wrong_one() -> None:
    world = a_world(a_device("gpu0"), a_device("gpu1"), holding(a_task("t", name="train"), "gpu0", mb=GIB))
    world.measure([a_sample("gpu1", LATER, used_mb=Mib(5000), foreign_mb=Mib(5000))])
    [found] = findings(world, fleet=idle(key("gpu0")))
    assert (found.kind, found.evidence["used_without_lease"]) == ("gpu-held-wrong-device", "n1/gpu1")
    assert (found.subject, found.remedy) == ("n1/gpu0 train", "gpubroker stack t")
    world.measure([a_sample("gpu0", LATER, used_mb=Mib(9000), by_holder={"t:1": Mib(9000)})])
    [found] = findings(world, fleet=idle(key("gpu0")))
    assert found.kind == "gpu-held-unasked"  # it does have its data there


@pytest.mark.parametrize(("cpu", "kind"), [(0.9, "gpu-held-on-cpu"), (0.1, "gpu-held-unasked")])
def test_an_unused_gpu_beside_busy_cpus_has_its_model_on_the_cpu(cpu: float, kind: str) -> None:
    world = a_world(holding(a_task("t", name="train"), "gpu0", mb=GIB))
    node_shows(world, cpu=cpu)
    [found] = findings(world, fleet=idle(key("gpu0")))
    assert (found.kind, found.evidence["node_cpu"]) == (kind, cpu)


def test_a_task_that_cannot_start_says_what_would_help() -> None:
    task = a_task("big", tenant="acme")
    stuck = [StuckTask(task, "90 GiB exceed the largest GPU", "gpubroker explain big")]
    [found] = findings(a_world(), stuck=stuck)
    assert (found.kind, found.subject, found.tenant) == ("pending-for-ever", "big", "acme")
    assert (found.remedy, found.first_seen) == ("gpubroker explain big", NOW)
    assert "90 GiB exceed the largest GPU" in found.cause


def test_repeated_failures_for_lack_of_memory_are_told_apart() -> None:
    failures = tuple(
        MemoryFailures(memory, "acme", "train", TaskId("t"), 4, Instant(NOW), LATER)
        for memory in ("cuda", "host", "node")
    )
    found = findings(a_world(), fleet=FleetSeen(memory_failures=failures))
    assert [one.kind for one in found] == [f"out-of-memory-{of}" for of in ("cuda", "host", "node")]
    assert [one.remedy for one in found] == [
        "gpubroker estimates train", "gpubroker explain t", "gpubroker nodes",
    ]  # fmt: skip
    assert "ran out of GPU memory 4 times within 17 min" in found[0].cause


def a_lonely_fleet(*more: Any) -> World:
    nodes = [part for node in ("n1", "n2") for part in (a_node(node), a_device("gpu0", node))]
    runs = [holding(a_task(f"t{n}"), "gpu0", mb=10 * GIB) for n in range(4)]
    return a_world(*nodes, *runs, *more)


def test_work_on_one_node_alone_is_a_finding_while_tasks_wait() -> None:
    waits = a_task("waits", gpu_mb=70 * GIB)
    [found] = findings(a_lonely_fleet(waits))
    assert (found.kind, found.subject) == ("all-on-one-node", "n1")
    assert found.evidence == {"share": 1.0, "nodes": 2, "waiting": 1}
    assert findings(a_lonely_fleet()) == []
    elsewhere = holding(a_task("other"), key("gpu0", "n2"), mb=10 * GIB)
    assert findings(a_lonely_fleet(waits, elsewhere)) == []


@pytest.mark.parametrize("gpus", [(), (a_device("gpu0", "n1"), a_device("gpu0", "n2"))])
def test_where_no_gpu_is_leased_the_work_on_one_node_is_its_cpus(gpus: tuple[Any, ...]) -> None:
    nodes = a_node("n1"), a_node("n2"), *gpus
    runs = [holding(a_task(f"t{n}", cpu=1.0)) for n in range(4)]
    waits = a_task("waits", gpus=0, cpu=65.0)
    [found] = findings(a_world(*nodes, *runs, waits))
    assert (found.kind, found.subject, found.evidence["share"]) == ("all-on-one-node", "n1", 1.0)
    assert findings(a_world(*nodes, *runs[:3], waits)) == [], "by chance"
    elsewhere = holding(a_task("other", cpu=1.0), node="n2")
    assert findings(a_world(*nodes, *runs, elsewhere, waits)) == []


def a_slow_start(name: str, seconds: float | None, ago: float = 10.0, **fields: Any) -> Holding:
    """A run that took so long to start some time ago; None: it has not started."""
    if seconds is None:
        return holding(a_task(name), state=TaskState.ADMITTED, admitted_at=Instant(LATER - ago), **fields)
    started_at = LATER - ago
    times: dict[str, Any] = {"ordered_at": Instant(started_at - seconds), "started_at": Instant(started_at)}
    return holding(a_task(name), **times, **fields)


def test_processes_that_take_long_to_start_are_counted_by_node() -> None:
    slow = a_slow_start("slow", 45.0), a_slow_start("still", None, ago=90.0)
    fine = a_slow_start("quick", 2.0), a_slow_start("new", None), a_slow_start("past", 60.0, ago=4000.0)
    members, demand = (Member(0, NodeName("n1")),), Demand(bundles=(Demand(),))
    gang = a_slow_start("gang", 60.0, demand=demand, holder=Gang(members))
    [found] = findings(a_world(*slow, *fine, gang))
    assert (found.kind, found.subject) == ("slow-starts", "n1")
    assert found.evidence == {"runs": 2, "longest_seconds": 90.0}
    assert "ray.spares" in found.remedy
    busy = a_world(*slow)
    node_shows(busy, cpu=0.99)
    [found] = [one for one in findings(busy) if one.kind == "slow-starts"]
    assert ("ray.spares" in found.remedy, "ray.max_runs" in found.remedy) == (False, True)


@pytest.mark.parametrize(
    ("node", "kind"),
    [
        ({"max_runs": 1}, "run-slots-used-up"),
        ({"cpu": 2.0}, "cpus-used-up"),
        ({"ready": False}, "node-silent"),
    ],
)
def test_free_gpu_memory_that_no_run_can_take_has_another_bottleneck(node: dict[str, Any], kind: str) -> None:
    world = a_world(a_node(**node), a_device(), holding(a_task("t", cpu=2.0)), a_task("waits", gpu_mb=GIB))
    assert kinds(findings(world)) == [(kind, "n1")]


def test_free_run_slots_do_not_matter_without_free_memory() -> None:
    full = holding(a_task("t"), "gpu0", mb=80 * GIB)
    assert findings(a_world(a_node(max_runs=1), a_device(), full, a_task("waits", gpu_mb=GIB))) == []


@pytest.mark.parametrize(("used", "count"), [(0.2, 1), (0.8, 0), (None, 0)])
@pytest.mark.parametrize("busy", ["cpu", "network"])
def test_busy_cpus_or_a_busy_network_beside_waiting_gpus_are_a_bottleneck(
    used: float | None, count: int, busy: str
) -> None:
    world = a_world(a_device("gpu0"), a_device("gpu1"), holding(a_task("t"), "gpu0", mb=GIB))
    world.measure([a_sample("gpu0", LATER, utilization=used)])
    shown: dict[str, Any] = {busy: 0.99}
    node_shows(world, **shown)
    found = findings(world)
    assert kinds(found) == [(f"{busy}-bottleneck", "n1")] * count
    assert [one.evidence for one in found] == [{busy: 0.99, "gpu_utilization": used}] * count
    node_shows(world, at=LATER - 100.0, **shown)
    assert findings(world) == []


@pytest.mark.parametrize(
    ("percent", "why", "remedy"),
    [
        (93.0, "each worker uses up a core", "gpubroker workers scale s 6"),
        (
            4.0,
            "a worker answers 2 calls at once",
            "a set with a higher max_concurrency, or gpubroker workers",
        ),
    ],
)
def test_calls_that_wait_are_told_with_what_their_workers_lack(percent: float, why: str, remedy: str) -> None:
    waiting = WaitingCalls(TaskId("s"), "acme", "judges", 3, 2, 6, 9, percent)
    [found] = findings(a_world(), fleet=FleetSeen(waiting_calls=(waiting,)))
    assert (found.kind, found.subject, found.tenant) == ("calls-wait", "judges", "acme")
    assert why in found.cause
    assert found.remedy.startswith(remedy)


def test_node_that_answers_but_is_unreachable_from_nodes_is_found_once() -> None:
    world = a_world(*(a_node(name, ready=name != "n4") for name in ("n1", "n2", "n3", "n4")))
    for name in ("n1", "n2"):
        seen = ((other, f"10.0.0.3:{port}", "refused") for other, port in (("n3", 8), ("n4", 9), ("n5", 9)))
        node_shows(world, name, unreached=tuple(UnreachedNode(NodeName(it[0]), *it[1:]) for it in seen))
    silent, found = findings(world)
    assert (silent.kind, silent.subject) == ("node-silent", "n4")
    assert (found.kind, found.subject, found.evidence) == ("node-unreachable-from-node", "n3", {"nodes": 2})
    assert found.cause.startswith("n1 and 1 more cannot connect to 10.0.0.3:8 of n3")
    assert found.remedy.startswith("nc -vz 10.0.0.3 8, on n1;")
    node_shows(world, "n1", at=LATER - 100.0)
    assert findings(world)[1].cause.startswith("n2 cannot connect")


def test_a_limit_that_is_used_up_is_a_finding_while_a_task_asks_for_it() -> None:
    limits = CustomLimit("licence", 1.0), CustomLimit("fpga", 1.0, per_node=True), CustomLimit("seat", 5.0)
    custom = {"licence": 1.0, "fpga": 1.0, "seat": 1.0}
    run = holding(a_task("t", custom=custom))
    policy = Policy(custom_limits=limits)
    assert kinds(findings(a_world(run, a_task("w", custom=custom)), policy)) == [("limit-used-up", "licence")]
    assert findings(a_world(run), policy) == []


def test_full_disks_and_a_spilling_object_store_are_found_while_measured() -> None:
    disks = DiskSample("/", 100, 50), DiskSample("/data", 1000, 50), DiskSample("/tmp/ray", 1000, 5)
    world = a_world()
    node_shows(world, disks=disks, store=StoreSample(128, 64))
    found = findings(world)
    assert kinds(found) == [
        ("disk-full", "n1:/data"), ("disk-full", "n1:/tmp/ray"), ("object-store-spills", "n1")
    ]  # fmt: skip
    assert [one.severity for one in found[:2]] == [Severity.WARNING, Severity.CRITICAL]
    node_shows(world, at=LATER - 100.0, disks=disks, store=StoreSample(128, 64))
    assert findings(world) == []


def test_clocks_and_versions_that_differ_between_nodes_are_found() -> None:
    agent = {"python": "3.12.1", "ray": "2.50.0", "clock_ahead_seconds": 0}
    agents = {
        "n1": agent, "n2": agent, "n3": {**agent, "clock_ahead_seconds": 40},
        "n4": {**agent, "clock_ahead_seconds": -40, "ray": "2.44.0"},
        "n5": {"release": "0.2.0", "protocol": 8, "outdated": True},
    }  # fmt: skip
    found = findings(a_world(), executor={**WELL.executor, "agents": agents})
    assert kinds(found) == [
        ("clocks-apart", "n3"), ("clocks-apart", "n4"), ("agent-outdated", "n5"),
        ("ray-version-differs", "n4"),
    ]  # fmt: skip
    assert found[1].cause == "The clock of n4 is 40 s behind the leader's."
    assert found[3].evidence == {"version": "2.44.0", "usual": "2.50.0"}


@pytest.mark.parametrize(
    ("known", "kind", "subject"),
    [
        ({"has_leader": False}, "no-leader", "leader"),
        ({"is_stale": True, "age_seconds": 40.0}, "database-unreachable", "database"),
        ({"disk_full": "disk full: /data"}, "service-disk-full", "service"),
        ({"executor": {**WELL.executor, "head_fault": "no answer"}}, "ray-unreachable", "h:6379"),
        ({"executor": {"state": "failed", "message": "no Ray there"}}, "ray-unreachable", "ray"),
        ({"servers_down": [ServerWay("t", "http", "refused", True)]}, "model-server-unreachable", "t (http)"),
        (
            {"servers_refusing": [ServerWay("t", "http", "401", True)]},
            "model-server-unauthorized",
            "t (http)",
        ),
    ],
)
def test_a_part_that_does_not_answer_is_critical(known: dict[str, Any], kind: str, subject: str) -> None:
    [found] = findings(a_world(), **known)
    assert (found.kind, found.subject, found.severity) == (kind, subject, Severity.CRITICAL)


def test_a_server_that_answers_over_its_other_port_is_no_loss_of_work() -> None:
    [found] = findings(a_world(), servers_down=[ServerWay("t", "grpc", "refused", False)])
    assert found.severity is Severity.WARNING


def test_a_gpu_is_held_idle_for_as_long_as_its_first_holder_has_kept_it_so() -> None:
    world = a_world(
        holding(a_task("a", admitted_at=NOW), "gpu0", mb=GIB),
        holding(a_task("b", admitted_at=Instant(NOW + 5.0)), "gpu0", mb=GIB),
    )
    assert held_idle_seconds(world, idle(key("gpu0")), LATER) == {key("gpu0"): LATER - NOW}
    assert held_idle_seconds(world, FleetSeen(), LATER) == {}


def test_a_gpu_that_its_agent_cannot_use_is_named_with_the_drivers_words() -> None:
    agents = {"n1": {"gpu_faults": {"GPU-b": "GPU is lost"}}}
    [found] = findings(a_world(), executor={**WELL.executor, "agents": agents})
    assert kinds([found]) == [("gpu-unusable", "n1 GPU-b")]
    assert (found.severity, found.cause) == (Severity.CRITICAL, "GPU-b of n1 cannot be used: GPU is lost.")


@pytest.mark.parametrize(("has_had", "severity"), [(True, Severity.CRITICAL), (False, Severity.NOTE)])
def test_a_node_without_gpus_says_why_and_is_critical_if_it_had_some(
    has_had: bool, severity: Severity
) -> None:
    had = [a_device("gpu0", simulated=False)] if has_had else []
    world = a_world(a_node("n1"), *had, a_node("n2"), a_device("gpu0", "n2"))
    agents = {"n1": {"gpu_absence": "the NVIDIA driver is not loaded"}, "n2": {"gpu_absence": None}}
    [found] = findings(world, executor={**WELL.executor, "agents": agents})
    assert (found.kind, found.subject, found.severity) == ("no-gpus", "n1", severity)
    assert "the NVIDIA driver is not loaded" in found.cause
