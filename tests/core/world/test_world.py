"""The World is what the log says, whichever way it was read."""

import pytest
from gpubroker_server.core.domain.decisions import Decision, Request, write_move
from gpubroker_server.core.domain.device import Node
from gpubroker_server.core.domain.errors import OutOfSync
from gpubroker_server.core.domain.lease import HolderKind, LeaseState, Proof, move_lease, release
from gpubroker_server.core.domain.task import Move, TaskState
from gpubroker_server.core.domain.units import Instant, NodeName, Position, TaskId
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.world.events import Event, events_of
from gpubroker_server.core.world.payload import changed, encode, read
from gpubroker_server.core.world.world import World
from hypothesis import given, settings
from msgspec.structs import replace

from tests.builders import (
    GIB,
    NOW,
    a_device,
    a_lease,
    a_node,
    a_pledge,
    a_sample,
    a_task,
    a_world,
    commit,
    holding,
    key,
    let_go,
    submit,
)
from tests.core.scenarios import POLICY, Chapter, Story, clusters, stories, twin


def picture(world: World) -> dict[str, object]:
    """Everything decisions depend on, as plain values."""
    return {
        "tasks": world.tasks,
        "leases": world.leases,
        "releasing": set(world.unconfirmed.releasing),
        "pledges": world.pledges,
        "waiting": {group.key: list(group) for group in world.queue.groups.values()},
        "aside": (world.queue.delayed, world.queue.held),
        "active": world.active,
        "runs": {node: runs for node, runs in world.runs.items() if runs},
        "use": {node: (use.cpu, use.memory_mb, use.runs) for node, use in world.use.items()},
        "custom": {name: amount for name, amount in world.custom_use.items() if amount},
        "ledgers": {
            key: (ledger.holdings, ledger.pledges, ledger.free_mb(), ledger.free_after_releases_mb())
            for key, ledger in world.ledgers.items()
        },
    }


@given(clusters(), stories)
@settings(max_examples=40)
def test_a_world_that_read_the_log_equals_one_that_read_the_rows(world: World, story: list[Chapter]) -> None:
    tale = Story(world)
    for chapter in story:
        for _ in tale.happens(chapter):
            pass
        decisions = plan_cycle(world, POLICY, Instant(tale.now)).decisions
        from_rows = twin(world, tale.number)
        from_rows.enter_due(Instant(tale.now))
        assert picture(from_rows) == picture(world)
        commit(world, decisions, tale.now)


def test_an_event_that_was_applied_already_changes_nothing() -> None:
    world = a_world()
    event = Event(Position(1), NOW, "node.seen", "n7", 1, "", encode(a_node("n7")))
    world.apply([event])
    before = world.nodes[NodeName("n7")]
    world.apply([event])
    assert world.position == 1
    assert world.nodes[NodeName("n7")] is before


def node_events(*positions: int) -> list[Event]:
    """One new node for each position of the log."""
    rows = {position: a_node(f"n{position}") for position in positions}
    return [Event(Position(p), NOW, "node.seen", row.name, 1, "", encode(row)) for p, row in rows.items()]


def test_a_gap_in_the_log_raises_and_nothing_of_the_batch_is_applied() -> None:
    world = World()
    world.apply(node_events(1, 2))
    with pytest.raises(OutOfSync, match="after position 2, event 4 came: 3 is missing"):
        world.apply(node_events(2, 4))
    with pytest.raises(OutOfSync, match="event 5 came: 4 is missing"):
        world.apply(node_events(3, 5))
    assert (world.position, set(world.nodes)) == (2, {"n1", "n2"})


def test_event_that_does_not_fit_the_world_is_named_after_applying_earlier() -> None:
    world = World()
    lease = a_lease(a_task("run"), "gpu7", 1, version=1)
    strange = Event(Position(2), NOW, "lease.reserved", lease.key, 1, "default", encode(lease))
    with pytest.raises(OutOfSync, match=rf"event 2 \(lease\.reserved {lease.key}\).*the World is at 1"):
        world.apply([*node_events(1), strange, *node_events(3)])
    assert (world.position, set(world.nodes)) == (1, {"n1"})


def test_nodes_devices_and_requests_come_from_the_log() -> None:
    world = World()
    request = Request("r1", TaskId("t"), "default", "cancel", {}, NOW)
    rows = [
        ("node.seen", "n1", encode(a_node())),
        ("device.seen", key("gpu0"), encode(a_device())),
        ("request.made", "r1", encode(request)),
    ]
    for number, (kind, name, fields) in enumerate(rows, start=1):
        world.apply([Event(Position(number), NOW, kind, name, 1, "", fields)])
    assert world.ledgers[key("gpu0")].free_mb() == 80 * GIB
    assert world.requests == {"r1": request}
    commit(world, Decision("t", "cancel", requests_done=("r1",)))
    assert world.requests == {}


def test_node_event_has_only_fields_of_release_0_2_0_and_keeps_the_cordon() -> None:
    """That release ends with an event of a node that has others."""
    drained = a_node(cordoned=True, cordon_reason="a fan", draining_since=NOW, drain_deadline_at=NOW + 1)
    known = {"name", "cpu", "memory_mb", "max_runs", "incarnation", "boot_id", "ready", "cordoned"}
    [event] = events_of(Decision("n1", "node_seen", nodes=(drained,)))
    assert event.fields.keys() == {*known, "labels", "custom", "version"}
    later = {**event.fields, "of_a_later_release": 1}
    assert (changed(drained, later), read(later, Node)) == (drained, a_node(cordoned=True))


def test_a_device_that_is_reported_again_keeps_its_ledger() -> None:
    world = a_world(a_device(), holding(a_task("run", gpu_mb=60 * GIB), "gpu0"))
    world.add_device(a_device(mb=90 * GIB))
    assert world.ledgers[key("gpu0")].free_mb() == 30 * GIB
    assert world.by_node[NodeName("n1")] == [key("gpu0")]


def test_a_lease_on_an_unknown_device_raises() -> None:
    world = a_world()
    with pytest.raises(KeyError):
        world.add_lease(a_lease(a_task("run"), "gpu7", 1))
    assert world.leases == {}


def test_an_older_sample_and_one_of_an_unknown_device_change_nothing() -> None:
    world = a_world()
    world.measure([a_sample("gpu0", NOW - 1.0, foreign_mb=5 * GIB), a_sample("gpu7", foreign_mb=5 * GIB)])
    assert world.ledgers[key("gpu0")].free_mb() == 80 * GIB


def test_run_under_notice_frees_its_memory_for_its_preemptor_until_release() -> None:
    world = a_world(
        holding(a_task("low", priority=10, gpu_mb=60 * GIB), "gpu0"),
        a_task("high", priority=80, gpu_mb=70 * GIB),
    )
    commit(world, plan_cycle(world, POLICY, NOW).decisions)
    ledger = world.ledgers[key("gpu0")]
    assert ledger.releasing_mb(TaskId("high")) == 60 * GIB
    low = world.tasks[TaskId("low")]
    ended = write_move(low, Move.SUCCEEDED, finished_at=NOW)
    leases = tuple(move_lease(lease, LeaseState.RELEASING) for lease in world.leases_of(low))
    commit(world, Decision("low", "ended", tasks=(ended,), leases=leases))
    assert ledger.releasing_mb(TaskId("high")) == 60 * GIB
    let_go(world, "low")
    assert ledger.releasing_mb(TaskId("high")) == 0


def test_finished_task_stays_until_its_last_lease_and_is_counted_once() -> None:
    world = a_world(a_device(), holding(a_task("run", gpu_mb=60 * GIB), "gpu0"))
    run = world.tasks[TaskId("run")]
    leases = tuple(move_lease(lease, LeaseState.RELEASING) for lease in world.leases_of(run))
    ended = write_move(run, Move.SUCCEEDED, finished_at=NOW)
    commit(world, Decision("run", "ended", tasks=(ended,), leases=leases))
    assert "run" in world.tasks
    let_go(world, "run")
    assert "run" not in world.tasks
    assert world.finished == {("default", TaskState.SUCCEEDED): 1}


def test_events_of_a_task_or_a_lease_that_is_gone_change_nothing() -> None:
    world = a_world()
    before = picture(world)
    gone = f"run:gone:1:0:{key('gpu0')}"
    world.apply(
        [
            Event(Position(1), NOW, "task.failed", "gone", 5, "default", {"state": "failed"}),
            Event(Position(2), NOW, "lease.released", gone, 4, "default", {"state": "released"}),
        ]
    )
    assert picture(world) == before


def test_a_lease_without_a_run_is_added_and_removed_by_the_log() -> None:
    world = a_world()
    lease = replace(a_lease(a_task("m", fence=1), "gpu0", 30 * GIB, version=1), holder_kind=HolderKind.WORKER)
    commit(world, Decision("m", "load", leases=(lease,)))
    assert world.ledgers[key("gpu0")].free_mb() == 50 * GIB
    commit(world, Decision("m", "unload", leases=(release(lease, Proof.PROCESS_ABSENT),)))
    assert (world.ledgers[key("gpu0")].free_mb(), world.leases) == (80 * GIB, {})


def test_an_event_of_an_unknown_kind_only_moves_the_position() -> None:
    world = a_world()
    before = picture(world)
    world.apply([Event(Position(1), Instant(NOW + 5.0), "model.loaded", "m", 1, "", {})])
    assert picture(world) == before
    assert (world.position, world.as_of) == (1, NOW + 5.0)


def test_custom_resource_use_returns_to_zero_when_all_tasks_have_left() -> None:
    world = a_world(a_node())
    for number in range(3):
        submit(world, a_task(f"t{number}", custom={"licence": 0.1 * (number + 1)}))
    commit(world, plan_cycle(world, POLICY, NOW).decisions)
    assert world.custom_use == {"licence": 0.6}
    for number in range(3):
        let_go(world, f"t{number}")
    assert world.custom_use == {"licence": 0.0}


def test_a_pledge_is_removed_at_its_end() -> None:
    high = a_task("high", priority=80, gpu_mb=40 * GIB)
    world = a_world(a_device(), high, a_pledge(high, "gpu0", 40 * GIB))
    commit(world, plan_cycle(world, POLICY, NOW).decisions)
    assert world.pledges == {}
    assert world.ledgers[key("gpu0")].pledges == {}
