"""Demands as they are kept and written."""

import msgspec
from gpubroker_server.core.domain.demand import Demand, ceiling, interned
from gpubroker_server.core.domain.units import Mib

from tests.builders import GIB, a_demand, a_device


def test_interned_demand_is_written_without_computed_defaults() -> None:
    computed = Demand(gpus=1, cpu=float("0"), gpu_mb=Mib(1024))
    assert msgspec.to_builtins(interned(computed)) == {"gpus": 1, "gpu_mb": 1024}


def test_a_node_with_fewer_gpus_than_asked_cannot_fit() -> None:
    two = ceiling([(a_device("gpu0"), 80 * GIB), (a_device("gpu1"), 80 * GIB)])
    assert [two.may_fit(a_demand(gpus=count, gpu_mb=GIB)) for count in (1, 2, 3)] == [True, True, False]
    assert [two.may_fit(a_demand(gpus=count)) for count in (2, 3)] == [True, False]
