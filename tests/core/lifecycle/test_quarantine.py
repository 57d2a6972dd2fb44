"""What is in quarantine, which proof it waits for, and what gives it back."""

from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision, Request
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.holders import External
from gpubroker_server.core.domain.lease import HolderKind, Lease, LeaseState, Proof, quarantine
from gpubroker_server.core.domain.orders import (
    Ended,
    Ending,
    Gone,
    NodeLost,
    NodeReport,
    Report,
    ReportedDevice,
    Started,
)
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Fence, Instant, Mib, NodeName, Seconds, TaskId
from gpubroker_server.core.lifecycle.change_requests import carry_out
from gpubroker_server.core.lifecycle.quarantine import quarantined, removed
from gpubroker_server.core.lifecycle.reconcile import InventoryRules, reconcile
from gpubroker_server.core.lifecycle.runs import apply_reports
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.places import Places
from gpubroker_server.core.world.events import lease_change
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_device, a_lease, a_node, a_sample, a_task, a_world, commit, holding

RUN = TaskId("run")
LATER = Instant(NOW + 5.0)
RULES = InventoryRules(cluster="local")


def lost(world: World, node: str = "n1", at: float = NOW) -> None:
    name, now = NodeName(node), Instant(at)
    report = NodeLost(name, world.nodes[name].incarnation, now, "no beat")
    commit(world, apply_reports(world, [report], now, Policy()), now)


def a_lost_run(**fields: Any) -> World:
    """On gpu0, of 8 GiB; its node does not answer any more."""
    world = a_world(a_device("gpu0"), holding(a_task("run", gpu_mb=8 * GIB), "gpu0", **fields))
    lost(world)
    return world


def leases(world: World, holder: str = "run") -> list[Lease]:
    return list(world.unconfirmed.quarantined.get(holder, {}).values())


def statement(world: World, *keys: str, at: float = LATER) -> Decision:
    named = list(keys) or [lease.key for lease in leases(world)]
    said = {"leases": named, "by": "olga", "reason": "powered off"}
    request = Request("ask_1", RUN, "default", "attest", said, NOW)
    world.add_request(request)
    return carry_out(world, request, Instant(at), Policy())


def answer(incarnation: str, **node: Any) -> NodeReport:
    there = (ReportedDevice("gpu0", "sim-80g", 0, Mib(80 * GIB), True),)
    return NodeReport(replace(a_node("n1"), incarnation=incarnation, **node), there, (), LATER)


def hear(world: World, *decisions: Decision) -> list[str]:
    """The proofs in the log that released leases."""
    told: list[tuple[str, Any]] = [lease_change(lease) for decision in decisions for lease in decision.leases]
    commit(world, decisions, LATER)
    return [fields["proof"] for what, fields in told if what == "released" and "proof" in fields]


def is_free(world: World) -> bool:
    task, now = a_task("new", gpu_mb=75 * GIB), Instant(LATER + 0.5)
    return Places(Draft(world), Policy(), now).best(task) is not None


# Each proof by name


def test_a_process_that_its_agent_found_gone_ends_its_quarantine() -> None:
    world = a_lost_run()
    gone = Gone(RUN, Fence(1), LATER, Proof.PROCESS_ABSENT)
    assert hear(world, *apply_reports(world, [gone], LATER, Policy())) == [Proof.PROCESS_ABSENT]
    assert leases(world) == []


@pytest.mark.parametrize(
    ("seen", "proof"),
    [
        (answer("n1-2"), Proof.AGENT_RESTARTED),
        (answer("n1-2", boot_id="another"), Proof.BOOT_CHANGED),
    ],
    ids=["a later agent of the same boot", "another boot"],
)
def test_an_agent_that_answers_and_does_not_know_it_ends_its_quarantine(
    seen: NodeReport, proof: Proof
) -> None:
    world = a_lost_run()
    assert hear(world, *reconcile(world, seen, LATER, Policy(), RULES)) == [proof]
    assert leases(world) == []


def test_an_agent_that_still_knows_it_does_not_end_its_quarantine() -> None:
    world = a_lost_run()
    seen = replace(answer("n1-2"), runs=((RUN, 1, 0),))
    assert hear(world, *reconcile(world, seen, LATER, Policy(), RULES)) == []
    assert [lease.state for lease in leases(world)] == [LeaseState.QUARANTINED]


def test_device_removed_from_its_machine_ends_the_quarantine_of_its_memory() -> None:
    """Quarantined memory of other devices stays as it is."""
    task = a_task("run", gpus=2, gpu_mb=8 * GIB)
    world = a_world(a_device("gpu0"), a_device("gpu1"), holding(task, "gpu0", "gpu1"))
    lost(world)
    assert removed(world) == []
    gone = replace(world.ledgers[a_device("gpu0").key].device, present=False, version=2)
    commit(world, Decision("n1", "node_seen", devices=(gone,)))
    assert hear(world, *removed(world)) == [Proof.DEVICE_REMOVED]
    assert [lease.device for lease in leases(world)] == [a_device("gpu1").key]
    assert gone.key not in world.ledgers, "nothing holds it any more"
    assert removed(world) == []


def test_of_a_run_whose_process_stays_only_the_lease_on_the_lost_gpu_ends() -> None:
    """Its process cannot be killed: the kernel waits for the GPU that is lost."""
    task = a_task("run", gpus=2, gpu_mb=8 * GIB)
    world = a_world(a_device("gpu0"), a_device("gpu1"), holding(task, "gpu0", "gpu1"))
    lost(world)
    seen = replace(answer("n1-2"), runs=((RUN, Fence(1), 0),), faults=(("gpu1", "GPU is lost"),))
    commit(world, reconcile(world, seen, LATER, Policy(), RULES), LATER)
    assert hear(world, *removed(world)) == [Proof.DEVICE_REMOVED]
    assert [lease.device for lease in leases(world)] == [a_device("gpu0").key]


def test_an_operators_statement_ends_it_and_says_who_and_why() -> None:
    world = a_lost_run()
    decision = statement(world)
    [note] = decision.audit
    assert (note.actor, note.action, note.reason) == ("olga", "quarantine.release", "powered off")
    assert (note.tenant, note.at, "run" in note.subject) == ("default", LATER, True)
    assert hear(world, decision) == [Proof.STATEMENT]
    assert (leases(world), world.requests) == ([], {})


# The statement


def test_memory_of_a_statement_is_free_only_with_the_next_measurement() -> None:
    world = a_lost_run()
    commit(world, Decision("n1", "node_seen", nodes=(replace(world.nodes[NodeName("n1")], ready=True),)))
    commit(world, statement(world), LATER)
    ledger = world.ledgers[a_device("gpu0").key]
    assert ledger.sample is None
    assert not is_free(world)
    world.measure([a_sample("gpu0", LATER - 1.0)])
    assert not is_free(world), "measured before the statement"
    world.measure([a_sample("gpu0", LATER + 0.1)])
    assert is_free(world)


def test_a_measurement_that_is_younger_than_the_statement_stays_in_force() -> None:
    world = a_lost_run()
    world.measure([a_sample("gpu0", LATER + 1.0)])
    commit(world, statement(world), LATER)
    assert world.ledgers[a_device("gpu0").key].sample is not None


def test_measurement_after_a_statement_overrules_the_statement() -> None:
    world = a_lost_run()
    commit(world, Decision("n1", "node_seen", nodes=(replace(world.nodes[NodeName("n1")], ready=True),)))
    commit(world, statement(world), LATER)
    world.measure([a_sample("gpu0", LATER + 0.1, used_mb=Mib(8 * GIB))])
    assert not is_free(world), "somebody still uses it"


def test_a_statement_about_what_is_measured_to_be_in_use_frees_nothing() -> None:
    world = a_lost_run()
    world.measure([a_sample("gpu0", LATER, used_mb=Mib(900), by_holder={"run:1": Mib(900)})])
    decision = statement(world)
    assert (decision.leases, decision.audit, decision.requests_done) == ((), (), ("ask_1",))


def test_measurement_before_an_agents_silence_contradicts_no_statement() -> None:
    world = a_world(a_device("gpu0"), holding(a_task("run", gpu_mb=8 * GIB), "gpu0"))
    world.measure([a_sample("gpu0", LATER, used_mb=Mib(900), by_holder={"run:1": Mib(900)})])
    lost(world, at=LATER + 0.1)
    assert statement(world, at=LATER + 0.2).leases, "nobody knows what became of its node since"
    commit(world, Decision("n1", "node_seen", nodes=(replace(world.nodes[NodeName("n1")], ready=True),)))
    assert statement(world, at=LATER + 0.2).leases == (), "its agent answers, and may still see it"


def test_an_old_measurement_contradicts_no_statement() -> None:
    world = a_lost_run()
    world.measure([a_sample("gpu0", NOW, used_mb=Mib(900), by_holder={"run:1": Mib(900)})])
    assert statement(world, at=NOW + 60.0).leases


def test_statement_covers_the_lease_it_names_and_none_quarantined_since() -> None:
    world = a_lost_run()
    [before] = leases(world)
    task = world.tasks[RUN]
    again = a_lease(replace(task, fence=Fence(2)), "gpu0", 8 * GIB, state=LeaseState.QUARANTINED)
    world.add_lease(again)
    assert hear(world, statement(world, before.key)) == [Proof.STATEMENT]
    assert leases(world) == [again]


def test_a_statement_frees_nothing_that_is_not_in_quarantine() -> None:
    world = a_world(holding(a_task("run", gpu_mb=8 * GIB), "gpu0"))
    held = [lease.key for claim in world.leases.values() for lease in claim.values()]
    decision = statement(world, *held)
    assert (decision.leases, decision.audit) == ((), ())


def test_ended_task_is_forgotten_once_its_memory_is_stated_to_be_free() -> None:
    done = a_task("run", state=TaskState.SUCCEEDED, fence=Fence(1))
    world = a_world(done, a_lease(done, "gpu0", 8 * GIB, state=LeaseState.QUARANTINED))
    commit(world, statement(world))
    assert world.tasks == {}


def test_a_proof_that_comes_after_the_statement_changes_nothing() -> None:
    world = a_lost_run()
    commit(world, statement(world), LATER)
    assert apply_reports(world, [Gone(RUN, Fence(1), LATER, Proof.PROCESS_ABSENT)], LATER, Policy()) == []


# Messages


def test_the_start_of_a_quarantine_is_kept_with_the_lease() -> None:
    world = a_lost_run()
    [one] = quarantined(world)
    assert (one.since, leases(world)[0].quarantined_at) == (NOW, NOW)
    assert (one.holder, one.attempt, one.rank, one.node) == ("run", 1, 0, "n1")


def test_ranks_and_attempts_are_told_apart_and_the_longest_comes_first() -> None:
    task = a_task("run", gpus=1, gpu_mb=8 * GIB, fence=Fence(2), state=TaskState.PENDING)
    first = a_lease(replace(task, fence=Fence(1)), "gpu0", 8 * GIB)
    parts = [
        replace(quarantine(first, Instant(at)), fence=Fence(fence), rank=rank)
        for fence, rank, at in ((2, 0, NOW), (1, 1, NOW - 9.0), (1, 0, NOW - 9.0))
    ]
    world = a_world(task, *parts)
    assert [(one.attempt, one.rank) for one in quarantined(world, "run")] == [(1, 0), (1, 1), (2, 0)]
    assert quarantined(world, "another") == []


def external(pid: int | None) -> World:
    task = a_task("run", demand=Demand(gpus=1, gpu_mb=Mib(8 * GIB)), holder=External(Seconds(60.0), pid))
    held = holding(task, "gpu0", state=TaskState.EXPIRED)
    kept = replace(held.leases[0], holder_kind=HolderKind.EXTERNAL, state=LeaseState.QUARANTINED)
    return a_world(held.task, kept)


@pytest.mark.parametrize(
    ("world", "first", "says"),
    [
        (a_lost_run(), Proof.AGENT_RESTARTED, "n1 does not answer: waits until an agent answers on n1"),
        (
            a_world(
                done := a_task("run", state=TaskState.SUCCEEDED, fence=Fence(1)),
                a_lease(done, "gpu0", 8 * GIB, state=LeaseState.QUARANTINED),
            ),
            Proof.PROCESS_ABSENT,
            "the agent of n1, which keeps killing its process, finds no trace of it",
        ),
        (external(None), Proof.HOLDER, "its holder says that the memory is free"),
        (external(4711), Proof.PROCESS_ABSENT, "process 4711"),
    ],
    ids=["node away", "agent at it", "external", "external with a process"],
)
def test_each_quarantine_shows_which_proof_it_waits_for(world: World, first: Proof, says: str) -> None:
    [one] = quarantined(world)
    assert one.awaits[0] is first
    assert says in one.message
    assert {Proof.BOOT_CHANGED, Proof.DEVICE_REMOVED, Proof.STATEMENT} <= set(one.awaits)
    assert len(set(one.awaits)) == len(one.awaits)


def test_release_of_a_run_that_was_never_in_quarantine_names_its_proof_too() -> None:
    world = a_world(holding(a_task("run", gpu_mb=8 * GIB), "gpu0"))
    ended = Ended(RUN, Fence(1), NOW, Ending.SUCCEEDED, result=b"1")
    reports: list[Report] = [
        Started(RUN, Fence(1), NOW, 7),
        ended,
        Gone(RUN, Fence(1), NOW, Proof.PROCESS_ABSENT),
    ]
    assert hear(world, *apply_reports(world, reports, NOW, Policy())) == [Proof.PROCESS_ABSENT]
