"""What each kind of task is: its holder, the kind of its leases, and who starts it."""

import pytest
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.holders import (
    INFERENCE,
    RUN,
    External,
    Gang,
    Holder,
    Member,
    Model,
    WorkerSeat,
    holder_of,
    is_started_by_agent,
)
from gpubroker_server.core.domain.lease import HolderKind, holder_kind_of
from gpubroker_server.core.domain.ranks import rank_count
from gpubroker_server.core.domain.units import NodeName, Seconds, TaskId

from tests.builders import a_task

RANKS = (Member(0, NodeName("n1")), Member(1, NodeName("n1"), gone=True))


@pytest.mark.parametrize(
    ("holder", "kind", "count"),
    [
        (RUN, HolderKind.RUN, 1),
        (WorkerSeat(TaskId("t0")), HolderKind.RUN, 1),
        (Gang(), HolderKind.GANG_MEMBER, 0),
        (Gang(RANKS), HolderKind.GANG_MEMBER, 2),
        (External(Seconds(60.0)), HolderKind.EXTERNAL, 0),
        (Model("main", "llm"), HolderKind.MODEL, 0),
        (Model("main", ""), HolderKind.SERVER, 0),
    ],
)
def test_holder_has_leases_of_its_kind_and_ranks_that_agents_start(
    holder: Holder, kind: HolderKind, count: int
) -> None:
    assert holder_kind_of(holder) is kind
    assert rank_count(a_task(holder=holder)) == count
    assert is_started_by_agent(holder) is (kind in (HolderKind.RUN, HolderKind.GANG_MEMBER))


def test_inference_has_no_lease() -> None:
    assert (rank_count(a_task(holder=INFERENCE)), is_started_by_agent(INFERENCE)) == (0, False)
    with pytest.raises(ValueError, match="holds no memory"):
        holder_kind_of(INFERENCE)


def test_demand_tells_runs_gangs_and_inferences() -> None:
    assert holder_of(Demand(gpus=1)) is RUN
    assert holder_of(Demand(bundles=(Demand(),))) == Gang()
    assert holder_of(Demand(answered_by="llm")) is INFERENCE
