"""Gangs and plans over two nodes of one Ray cluster, and a node that is lost."""

from pathlib import Path
from typing import Any

import pytest
from gpubroker import Broker, Refused, Task

from tests.e2e.hands import PATIENCE_SECONDS, Hands
from tests.e2e.ray_node import RayNode
from tests.e2e.service_process import until
from tests.e2e.work import lines_of

SMALL: dict[str, Any] = {"gpu_mb": 4096}
BIG_ONE: dict[str, Any] = {"gpus": 1, "kinds": ["sim-big"]}


def adding_up(broker: Broker, bundle: dict[str, Any], **how: Any) -> Task:
    """A gang of two whose result is 7.5."""
    return broker.submit("tests.e2e.work:add_up", 2.5, bundles=[{"count": 2, **bundle}], **how)


def nodes_of(broker: Broker, gang: Task) -> set[str]:
    placed = [event for event in broker.events(gang) if event.kind == "lease.reserved"]
    newest = max(event.fields["fence"] for event in placed)
    return {event.fields["device"].split("/")[1] for event in placed if event.fields["fence"] == newest}


@pytest.mark.parametrize(
    ("how", "bundle", "nodes"),
    [
        ("strict_spread", SMALL, 2),
        ("spread", SMALL, 2),
        ("strict_pack", SMALL, 1),
        ("pack", SMALL, 1),
        ("pack", BIG_ONE, 2),
    ],
)
def test_ranks_lie_on_as_many_nodes_as_they_are_told_and_find_each_other(
    cluster: Broker, how: str, bundle: dict[str, Any], nodes: int
) -> None:
    gang = adding_up(cluster, bundle, strategy=how)
    assert cluster.result(gang, timeout_seconds=PATIENCE_SECONDS) == 7.5
    assert len(nodes_of(cluster, gang)) == nodes


def test_what_no_single_node_has_is_refused_to_a_gang_that_must_lie_on_one(cluster: Broker) -> None:
    with pytest.raises(Refused):
        adding_up(cluster, BIG_ONE, strategy="strict_pack")


def test_gang_with_a_rank_not_ready_in_time_gives_its_place_up_and_retries(
    cluster: Broker, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gang = cluster.submit(
        "tests.e2e.late:begin",
        bundles=[{"count": 2, **SMALL}],
        strategy="strict_spread",
        env={"GATE": str(gate)},
        grace_seconds=0,
    )
    until(lambda: cluster.get(gang).error is not None, "its time to get ready is over")
    late = cluster.get(gang)
    assert late.error is not None
    assert "missing: 0 on " in late.error.message
    gate.touch()
    assert cluster.result(gang, timeout_seconds=PATIENCE_SECONDS) == "begun"


def test_what_is_planned_for_the_running_cluster_goes_by_what_runs_there(hands: Hands) -> None:
    broker = hands.broker
    trainers = [{"name": "trainer", "count": 2, "resources": BIG_ONE}]
    free = broker.plan(trainers)
    assert free.fits
    assert {place.node for place in free.places} == {node.name for node in broker.nodes()}
    holder = hands.at_work("holder", priority="critical", **BIG_ONE)
    taken = broker.plan(trainers)
    assert not taken.fits
    assert [(part.placed, part.missing) for part in taken.components] == [(1, 1)]
    hands.end(holder)


def test_gang_that_loses_a_node_waits_for_all_ranks_and_begins_anew(
    cluster: Broker, second_node: RayNode, tmp_path: Path
) -> None:
    """Each rank must be released or quarantined first."""
    witness, enough = tmp_path / "witness", tmp_path / "enough"
    witness.touch()
    gang = cluster.submit(
        "tests.e2e.work:hold",
        str(witness),
        str(enough),
        bundles=[{"count": 2, **SMALL}],
        strategy="strict_spread",
        grace_seconds=20,
    )
    until(lambda: len(lines_of(str(witness))) == 2, "both ranks are at work")
    second_node.lose()
    until(lambda: cluster.get(gang).state == "pending", "the gang waits again")
    waiting = cluster.get(gang)
    assert (waiting.failures, waiting.preemptions) == (0, 0), "it is nobody's fault"
    assert [(node.name, node.ready) for node in cluster.nodes() if not node.ready] == [("n2", False)]
    kept = [(gpu.node, holder.id, holder.state) for gpu in cluster.gpus() for holder in gpu.holders]
    assert kept == [("n2", gang.id, "quarantined")], "whatever ran there may still use its memory"
    second_node.start()
    enough.touch()
    assert cluster.wait(gang, timeout_seconds=PATIENCE_SECONDS).state == "succeeded"
