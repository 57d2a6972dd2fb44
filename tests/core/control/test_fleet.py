"""Fleet control step by step: background work follows its targets, and the log hears what changes."""

from collections.abc import Iterable

from gpubroker_server.core.control.alarm import Threshold
from gpubroker_server.core.control.disk_guard import DiskGuard, DiskLevel, DiskStanding
from gpubroker_server.core.control.fleet import (
    FleetControl,
    FleetRules,
    FleetSeen,
    background_room,
    disk_levels,
)
from gpubroker_server.core.control.idle import Idle, IdleRules
from gpubroker_server.core.control.targets import FleetScope, FleetTarget, Measure
from gpubroker_server.core.domain.decisions import Notice, StreamState
from gpubroker_server.core.domain.device import DiskSample, FileClass, NodeSample, WatchedRoot
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, Seconds
from gpubroker_server.core.world.background import BackgroundRoom
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import GIB, NOW, Holding, a_device, a_node, a_sample, a_task, a_world, holding, key

POLICY = Policy()
UTILIZATION = FleetTarget(Measure.GPU_UTILIZATION, 0.6, 0.8)
N1, N2 = NodeName("n1"), NodeName("n2")


def a_fleet(*runs: Holding) -> World:
    nodes = (part for node in ("n1", "n2") for part in (a_node(node), a_device("gpu0", node)))
    return a_world(*nodes, *runs)


def a_control(rules: FleetRules, policy: Policy = POLICY) -> FleetControl:
    """Both nodes were there in the last term."""
    control = FleetControl(rules, policy)
    control.nodes.expect([N1, N2])
    return control


def shows(world: World, at: float, **utilization: float | None) -> Instant:
    """By node: of its GPU and its CPUs."""
    for name, value in utilization.items():
        world.measure([a_sample(key("gpu0", name), at, utilization=value)])
        if value is not None:
            node = NodeName(name)
            world.node_samples[node] = NodeSample(node, Instant(at), value, Mib(10), Mib(5))
    return Instant(at)


def kinds(notices: Iterable[Notice]) -> list[tuple[str, str]]:
    return [(one.kind, one.key) for one in notices]


def test_work_streams_count_as_signals_say_and_all_processes_are_told() -> None:
    world, control = a_fleet(), a_control(FleetRules(), Policy(streams=(("nightly", 0.5),)))
    control.step(world, {}, Instant(NOW))
    assert control.seen.stream_weights == {"nightly": 0.5}
    world.streams["ladder"] = StreamState("ladder", 2.0, data_at=Instant(NOW - 3600.0), quality=0.0)
    control.step(world, {}, Instant(NOW))
    assert control.seen.stream_weights == {"ladder": 0.4, "nightly": 0.5}


def test_background_room_grows_below_the_fleet_target_and_shrinks_above() -> None:
    background = holding(a_task("b", priority=20), "gpu0", mb=40 * GIB)
    world = a_fleet(background, holding(a_task("high", priority=50), "gpu0", mb=20 * GIB))
    control = a_control(FleetRules((UTILIZATION,), controller=True))
    control.step(world, {}, shows(world, NOW, n1=0.2, n2=0.2))
    assert control.seen.background_mb == {"all": 0}  # as much as it has: nothing jumps
    for n in range(1, 60):
        control.step(world, {}, shows(world, NOW + 2 * n, n1=0.2, n2=0.2))
    risen = control.seen.background_mb["all"]
    assert risen > 40 * GIB
    for n in range(60, 240):
        control.step(world, {}, shows(world, NOW + 2 * n, n1=1.0, n2=1.0))
    assert control.seen.background_mb["all"] < risen - 40 * GIB
    [target] = control.seen.targets
    assert (target.scope, target.measure, target.value) == ("all", "gpu_utilization", 1.0)
    assert (target.is_in, target.share is None) == (False, False)


def test_model_that_makes_room_for_all_takes_nothing_from_background_work() -> None:
    model = holding(a_task("model", priority=-1), "gpu0", mb=40 * GIB)
    world, control = a_fleet(model), a_control(FleetRules((UTILIZATION,), controller=True))
    control.step(world, {}, shows(world, NOW, n1=0.2, n2=0.2))
    assert control.seen.targets[0].share == 0.0
    room = BackgroundRoom({"all": 100}, {N1: ("all",)})
    assert room.take(model.leases[0]) == []
    assert room.left_mb == {"all": 100}


def test_what_is_not_measured_leaves_the_share_as_it_is_and_begins_none() -> None:
    world, control = a_fleet(), a_control(FleetRules((UTILIZATION,), controller=True))
    control.step(world, {}, shows(world, NOW, n1=None, n2=None))
    assert control.seen.background_mb == {}
    control.step(world, {}, shows(world, NOW + 2, n1=0.5, n2=0.5))
    first = control.seen.targets[0].share
    control.step(world, {}, shows(world, NOW + 4, n1=None, n2=None))
    control.step(world, {}, shows(world, NOW + 4, n1=0.5, n2=0.5))  # a clock that stands still
    assert (first, control.seen.targets[0].share) == (0.0, 0.0)


def test_background_is_limited_only_by_the_controller_and_never_by_memory() -> None:
    world = a_fleet()
    memory = FleetTarget(Measure.GPU_MEMORY, 0.0, 0.8)
    for rules in (FleetRules((UTILIZATION,)), FleetRules((memory,), controller=True), FleetRules()):
        control = a_control(rules)
        control.step(world, {}, shows(world, NOW, n1=1.0, n2=1.0))
        assert control.seen.background_mb == {}
    nowhere = replace(UTILIZATION, scope=FleetScope("pool", "gone"))
    control = a_control(FleetRules((nowhere,), controller=True))
    control.step(world, {}, Instant(NOW))
    assert control.seen.background_mb == {}


def test_each_node_is_closed_by_the_scopes_that_it_is_in() -> None:
    room = background_room(a_fleet(), POLICY, {"all": 100, "node:n2": 0, "pool:gone": 0})
    assert room.scopes == {N1: ("all",), N2: ("all", "node:n2")}
    assert [room.is_closed(node) for node in (N1, N2)] == [False, True]


def test_instances_stand_for_the_gpu_that_they_are_part_of() -> None:
    world = a_world(a_node(), a_device("whole", split=True), a_device("part", parent="whole"))
    control = a_control(FleetRules((UTILIZATION,), controller=True))
    world.measure([a_sample("part", utilization=0.9)])
    control.step(world, {}, Instant(NOW))
    assert control.seen.targets[0].value == 0.9


def test_what_has_been_above_its_target_for_a_while_is_told_once() -> None:
    memory = FleetTarget(Measure.GPU_MEMORY, 0.1, 0.8)
    world, control = a_fleet(), a_control(FleetRules((memory,)))

    def told(at: float, used_mb: int) -> list[tuple[str, str]]:
        world.measure(a_sample(key("gpu0", node), at, used_mb=used_mb) for node in ("n1", "n2"))
        return kinds(control.step(world, {}, Instant(at)))

    constraint = [("fleet.RESOURCE_CONSTRAINT", "all")]
    assert told(NOW, 70 * GIB) == []
    assert told(NOW + 58, 72 * GIB) == []
    assert told(NOW + 60, 72 * GIB) == constraint
    assert told(NOW + 62, 72 * GIB) == []
    for after in (100, 160):  # below its target: out, and no constraint
        assert told(NOW + after, 0) == []
    assert told(NOW + 162, 70 * GIB) == []
    assert told(NOW + 222, 70 * GIB) == constraint


def test_a_measure_around_its_target_is_told_once_and_one_at_it_never() -> None:
    memory = FleetTarget(Measure.GPU_MEMORY, 0.1, 0.8)
    world, control = a_fleet(), a_control(FleetRules((memory,)))
    heard = []
    for n in range(600):
        used_mb = 64 * GIB if n < 100 else (66 + n % 3) * GIB if n < 200 else (63 + n % 3) * GIB
        world.measure(a_sample(key("gpu0", node), NOW + 2 * n, used_mb=used_mb) for node in ("n1", "n2"))
        heard += control.step(world, {}, Instant(NOW + 2 * n))
    assert kinds(heard) == [("fleet.RESOURCE_CONSTRAINT", "all")]
    assert heard[0].fields["threshold"] == 0.8


def test_idle_devices_and_nodes_are_looked_for_now_and_then_and_told_once() -> None:
    world, control = a_fleet(), a_control(FleetRules())
    heard: list[Notice] = []
    for n in range(200):
        heard += control.step(world, {}, shows(world, NOW + 2 * n, n1=0.0, n2=1.0))
    idle = [key("gpu0", "n1"), "n1"]
    assert sorted(kinds(heard)) == sorted(("fleet.IDLE_RESOURCE_DETECTED", name) for name in idle)
    assert heard[0].fields == {"utilization": 0.0, "idle_seconds": 300.0, "threshold": 0.05}
    assert set(control.seen.idle) == {Idle(name, 0.0, NOW) for name in idle}
    control.step(world, {}, Instant(NOW + 460))  # all samples are old by now: nothing is known
    assert len(control.seen.idle) == 2
    assert [control.is_idle_check_due(Instant(NOW + at)) for at in (461, 530)] == [False, True]


def test_backpressure_tells_its_begin_and_end_and_closes_bands_with_time() -> None:
    rules = FleetRules(
        thresholds={"queue_length": Threshold(10.0, 5.0), "queue:*": Threshold(3.0, 2.0)},
        next_band_seconds=Seconds(60.0),
    )
    world, control = a_fleet(), a_control(rules)
    pressed = {"queue_length": 12.0, "queue:acme": 1.0, "disk_percent": 99.0}
    begun = control.step(world, pressed, Instant(NOW))
    assert kinds(begun) == [("fleet.BACKPRESSURE_ACTIVATED", "queue_length")]
    [pressure] = control.seen.pressures
    assert (pressure.name, pressure.value, pressure.high) == ("queue_length", 12.0, 10.0)
    assert pressure.closed_below == 40
    assert control.seen.pressure_values == {"queue_length": 12.0}
    assert control.step(world, {"queue_length": 6.0}, Instant(NOW + 60)) == []
    assert control.seen.pressures[0].closed_below == 70
    [released] = control.step(world, {"queue_length": 4.0}, Instant(NOW + 62))
    assert released.kind == "fleet.BACKPRESSURE_RELEASED"
    assert released.fields == {"value": 4.0, "threshold": 5.0}
    assert control.seen.pressures == ()
    [of_tenant] = control.step(world, {"queue:acme": 3.0}, Instant(NOW))
    assert (of_tenant.key, of_tenant.tenant, begun[0].tenant) == ("queue:acme", "acme", "")
    assert control.seen.pressure_values == {"queue:acme": 3.0}


def test_next_leader_continues_the_published_state_and_repeats_no_event() -> None:
    rules = FleetRules(
        (FleetTarget(Measure.DISK, 0.0, 0.8), FleetTarget(Measure.HOST_MEMORY, 0.0, 0.8)),
        constraint_seconds=Seconds(0.0),
        thresholds={"queue_length": Threshold(10.0, 5.0, Seconds(10.0))},
        overload_thresholds={"cpu": Threshold(0.9, 0.8)},
        disk=DiskGuard(roots=(WatchedRoot("/scratch", FileClass.LOG),)),
        idle=IdleRules(0.05, Seconds(0.0)),
    )
    world, last = a_fleet(), a_control(rules)
    with_disks(world, NOW, n2=0.9)
    shows(world, NOW, n1=0.0)
    world.node_samples[N1] = replace(world.node_samples[N1], cpu=0.95)
    told = [*last.step(world, {"queue_length": 12.0}, Instant(NOW))]
    told += last.step(world, {"queue_length": 12.0}, Instant(NOW + 10))
    assert {one.kind for one in told} == {
        "fleet.BACKPRESSURE_ACTIVATED", "fleet.DISK_SPACE_LOW", "fleet.NODE_OVERLOADED",
        "fleet.IDLE_RESOURCE_DETECTED", "fleet.RESOURCE_CONSTRAINT",
    }  # fmt: skip
    following = FleetControl(rules, POLICY, last.seen)
    following.nodes.expect([N1, N2])
    assert following.seen.pressures == last.seen.pressures
    assert following.step(world, {"queue_length": 7.0}, Instant(NOW + 11)) == []
    assert [one.name for one in following.seen.pressures] == ["queue_length"]
    assert list(following.seen.full_disks) == ["n2"]
    assert following.seen.targets == last.seen.targets
    assert following.step(world, {"queue_length": 4.0}, Instant(NOW + 12)) == []
    released = following.step(world, {"queue_length": 4.0}, Instant(NOW + 22))
    assert kinds(released) == [("fleet.BACKPRESSURE_RELEASED", "queue_length")]


def with_disks(world: World, at: float, **used: float) -> Instant:
    """By node: the share of its only disk."""
    for name, share in used.items():
        node, disks = NodeName(name), (DiskSample("/data", 1000, round(1000 - 1000 * share)),)
        world.node_samples[node] = NodeSample(node, Instant(at), 0.5, Mib(10), Mib(5), disks=disks)
    return Instant(at)


def test_a_disk_that_fills_up_is_in_the_log_once_for_each_rise() -> None:
    world, control = a_fleet(), a_control(FleetRules(disk=DiskGuard()))
    heard = []
    for n, used in enumerate((0.5, 0.61, 0.62, 0.72, 0.72, 0.5, 0.65)):
        heard += control.step(world, {}, with_disks(world, NOW + 2 * n, n1=used, n2=0.1))
    assert [(one.kind, one.key, one.fields["level"], one.fields["threshold"]) for one in heard] == [
        ("fleet.DISK_SPACE_LOW", "n1", "warn", 0.60),
        ("fleet.DISK_SPACE_LOW", "n1", "block", 0.70),
        ("fleet.DISK_SPACE_LOW", "n1", "clean", 0.65),
    ]
    assert (heard[1].fields["path"], round(heard[1].fields["value"], 2)) == ("/data", 0.72)
    [low] = control.seen.low_disks
    assert (low.node, low.path, low.level) == ("n1", "/data", DiskLevel.CLEAN)


def test_full_disk_closes_its_node_whether_files_may_be_deleted_or_not() -> None:
    for roots in ((), (WatchedRoot("/scratch", FileClass.LOG),)):
        world, control = a_fleet(), a_control(FleetRules(disk=DiskGuard(roots=roots)))
        control.step(world, {}, with_disks(world, NOW, n1=0.7, n2=0.69))
        assert control.seen.full_disks == {"n1": "/data (70% used, 70% allowed)"}


def test_one_disk_with_several_watched_paths_gives_one_event() -> None:
    world, control = a_fleet(), a_control(FleetRules())

    def measured(*disks: DiskSample) -> list[Notice]:
        world.node_samples[NodeName("n1")] = NodeSample(
            NodeName("n1"), NOW, 0.5, Mib(10), Mib(5), disks=disks
        )
        return [one for one in control.step(world, {}, NOW) if one.kind == "fleet.DISK_SPACE_LOW"]

    one, same, other = (DiskSample(path, 1000, 390) for path in ("/a", "/a/logs", "/b"))
    other = other._replace(free_bytes=380)
    heard = measured(one, same, other)
    assert [notice.fields["path"] for notice in heard] == ["/a, /a/logs", "/b"]
    later = DiskSample("/a/more", 1000, 390)
    assert measured(one, same, later, other) == [], "it was told of that disk"


def test_a_disk_that_is_slow_to_answer_keeps_its_level_and_is_told_once() -> None:
    guard = DiskGuard(roots=(WatchedRoot("/scratch", FileClass.LOG),))
    world, control = a_fleet(), a_control(FleetRules(disk=guard))
    heard = control.step(world, {}, with_disks(world, NOW, n1=0.9))
    world.node_samples[N1] = replace(world.node_samples[N1], at=Instant(NOW + 2), disks=())
    heard += control.step(world, {}, Instant(NOW + 2))
    assert list(control.seen.full_disks) == ["n1"]
    heard += control.step(world, {}, with_disks(world, NOW + 4, n1=0.9))
    assert kinds(heard) == [("fleet.DISK_SPACE_LOW", "n1")]


def test_disk_missing_for_long_is_gone_and_no_longer_closes_its_node() -> None:
    guard = DiskGuard(roots=(WatchedRoot("/scratch", FileClass.LOG),))
    world, control = a_fleet(), a_control(FleetRules(disk=guard))
    control.step(world, {}, with_disks(world, NOW, n1=0.9))
    for after, closed in ((600, ["n1"]), (602, [])):
        world.node_samples[N1] = replace(world.node_samples[N1], at=Instant(NOW + after), disks=())
        control.step(world, {}, Instant(NOW + after))
        assert list(control.seen.full_disks) == closed


def test_a_node_that_is_not_measured_keeps_its_level_until_it_is_gone() -> None:
    guard = DiskGuard(roots=(WatchedRoot("/scratch", FileClass.LOG),))
    world, control = a_fleet(), a_control(FleetRules(disk=guard))
    control.step(world, {}, with_disks(world, NOW, n1=0.9))
    assert control.step(world, {}, Instant(NOW + 600)) == []
    assert list(control.seen.full_disks) == ["n1"]
    del world.nodes[N1]
    control.step(world, {}, Instant(NOW + 602))
    assert control.seen.full_disks == {}


def test_node_silent_for_long_is_neither_idle_nor_full_nor_overloaded() -> None:
    rules = FleetRules(
        overload_thresholds={"cpu": Threshold(0.9, 0.8)},
        disk=DiskGuard(roots=(WatchedRoot("/scratch", FileClass.LOG),)),
        idle=IdleRules(0.05, Seconds(0.0)),
        idle_check_seconds=Seconds(0.0),
    )
    world, last = a_fleet(), a_control(rules)
    shows(world, NOW, n1=0.0)
    with_disks(world, NOW, n1=0.9)
    world.node_samples[N1] = replace(world.node_samples[N1], cpu=0.95)
    last.step(world, {}, NOW)
    following = FleetControl(rules, POLICY, last.seen)  # the next leader
    world.add_node(replace(world.nodes[N1], ready=False))
    for control in (last, following):
        for after, found in ((1, True), (601, True), (602, False)):
            control.step(world, {}, Instant(NOW + after))
            seen = control.seen
            assert {bool(seen.idle), bool(seen.full_disks), bool(seen.overloaded)} == {found}, after


def test_disk_blocks_only_on_a_closed_node_and_keeps_its_level_if_silent() -> None:
    low = tuple(
        DiskStanding(NodeName(node), path, 0.9, level, 0.7)
        for node, path, level in (
            ("n1", "/a", DiskLevel.BLOCK), ("n2", "/a", DiskLevel.BLOCK), ("n2", "/slow", DiskLevel.WARN),
        )
    )  # fmt: skip
    seen = FleetSeen(low_disks=low, full_disks={NodeName("n1"): "/a"})
    disks = DiskSample("/a", 10, 1), DiskSample("/b", 10, 9)
    samples = [NodeSample(NodeName(name), NOW, 0.1, Mib(1), Mib(1), disks=disks) for name in ("n1", "n2")]
    assert disk_levels(seen, samples) == {
        ("n1", "/a"): DiskLevel.BLOCK,
        ("n1", "/b"): DiskLevel.ROOMY,
        ("n2", "/a"): DiskLevel.CLEAN,
        ("n2", "/b"): DiskLevel.ROOMY,
        ("n2", "/slow"): DiskLevel.WARN,
    }
