"""From the resources that are asked for to a demand."""

from typing import Any

import pytest
from gpubroker.wire.forecasts import Sizing
from gpubroker_server.core.admission.defaults import NamedDefaults
from gpubroker_server.core.admission.demands import demand_of, ranks_with_gpus_of_profile
from gpubroker_server.core.admission.sizing import UNKNOWN_SIZE
from gpubroker_server.core.admission.submission import Asked
from gpubroker_server.core.domain.demand import Demand, PlacementConstraints
from gpubroker_server.core.domain.units import Mib
from msgspec.structs import replace

from tests.core.admission.scenes import OneNode, admitted

NOTHING = NamedDefaults()
TYPE = NamedDefaults(gpu_mb=100, cpu=2.0)
L4, H100 = PlacementConstraints(kinds=("L4",)), PlacementConstraints(kinds=("H100",))

PROFILES = {"trainer": NamedDefaults(gpus=1, gpu_mb=8192, cpu=4.0)}


def learn(_demand: Demand) -> Sizing:
    return replace(UNKNOWN_SIZE, gpu_mb=Mib(7))


def demand(usual: NamedDefaults = NOTHING, **asked: Any) -> Demand:
    return demand_of(Asked(**asked), usual, PROFILES.__getitem__, 1.0, learn)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({}, Demand(cpu=1.0)),
        ({"gpus": 2}, Demand(gpus=2)),
        ({"gpu_mb": 5}, Demand(gpus=1, gpu_mb=Mib(5))),
        ({"gpu_fraction": 0.5}, Demand(gpus=1, gpu_fraction=0.5)),
        ({"exclusive": True, "cpu": 3.0}, Demand(gpus=1, exclusive=True, cpu=3.0)),
        ({"where": L4}, Demand(gpus=1, where=L4)),
        ({"gpu_mb": "learned"}, Demand(gpus=1, gpu_mb=Mib(7))),
        ({"gpus": 1, "gpu_mb": "learned"}, Demand(gpus=1, gpu_mb=Mib(7))),
        ({"memory_mb": 9, "placement": "spread"}, Demand(cpu=1.0, memory_mb=Mib(9), placement="spread")),
    ],
)
def test_a_size_means_one_gpu_and_gpus_need_no_cpu(asked: dict[str, Any], found: Demand) -> None:
    assert demand(**asked) == found


@pytest.mark.parametrize(
    ("usual", "asked", "found"),
    [
        (TYPE, {}, Demand(gpus=1, gpu_mb=Mib(100), cpu=2.0)),
        (TYPE, {"gpus": 1}, Demand(gpus=1, cpu=2.0)),
        (TYPE, {"gpu_mb": 5}, Demand(gpus=1, gpu_mb=Mib(5), cpu=2.0)),
        (NamedDefaults(gpu_mb="learned"), {}, Demand(gpus=1, gpu_mb=Mib(7))),
        (NamedDefaults(gpu_mb="learned"), {"gpus": 1}, Demand(gpus=1)),
        (NamedDefaults(gpus=2, memory_mb=Mib(4)), {}, Demand(gpus=2, memory_mb=Mib(4))),
        (NamedDefaults(gpus=2), {"gpus": 0}, Demand(cpu=1.0)),
    ],
)
def test_a_default_size_is_for_tasks_that_do_not_mention_gpus(
    usual: NamedDefaults, asked: dict[str, Any], found: Demand
) -> None:
    assert demand(usual, **asked) == found


def test_each_rank_of_a_gang_has_a_demand_and_custom_resources_add_up() -> None:
    seat = Asked(cpu=2.0, custom=(("seat", 1.0),))
    gang = demand(bundles=(Asked(gpus=1), seat, seat), where=L4, strategy="spread", min_ranks=2)
    ranks = (Demand(gpus=1, where=L4), *[Demand(cpu=2.0, custom=(("seat", 1.0),), where=L4)] * 2)
    assert gang == Demand(custom=(("seat", 1.0),), bundles=ranks, strategy="spread", min_ranks=2), (
        "of the ranks that it needs at least"
    )
    whole = demand(bundles=(seat, seat), strategy="spread")
    assert whole.custom == (("seat", 2.0),)
    assert demand(bundles=(Asked(), Asked()), min_ranks=2).min_ranks is None


def test_outer_restrictions_hold_for_each_rank_that_has_none_of_its_own() -> None:
    zone = PlacementConstraints(kinds=("L4",), nodes=(("zone", ("a",)),))
    first, second = demand(bundles=(Asked(gpus=1, where=H100), Asked(gpus=1)), where=zone).bundles
    assert (first.where, second.where) == (replace(zone, kinds=("H100",)), zone)


@pytest.mark.parametrize(
    ("bundles", "sizes"),
    [
        ((Asked(cpu=1.0), Asked()), [100, 100]),
        ((Asked(where=L4), Asked()), [100, None]),
        ((Asked(gpus=1), Asked()), [None, None]),
        ((Asked(gpu_mb=5), Asked(where=L4)), [5, 100]),
    ],
)
def test_default_size_is_for_ranks_that_only_restrict_devices_or_for_all(
    bundles: tuple[Asked, ...], sizes: list[int | None]
) -> None:
    assert [rank.gpu_mb for rank in demand(TYPE, bundles=bundles).bundles] == sizes


def test_ranks_of_one_learned_size_are_learned_once() -> None:
    gang = Asked(bundles=(Asked(gpu_mb="learned"), Asked(gpu_mb="learned"), Asked(cpu=1.0)))
    new = admitted(demand=gang, fleet=OneNode())
    assert new.spec.sizing is not None
    assert new.spec.sizing.message.startswith("it gets whole GPUs")
    assert [rank.gpus for rank in new.task.demand.bundles] == [1, 1, 0]


def test_rank_with_a_profile_of_its_own_has_the_sizes_of_that() -> None:
    trainer, rollout = Asked(profile="trainer"), Asked(cpu=2.0)
    ranks = demand(NamedDefaults(), bundles=(trainer, rollout, Asked(profile="trainer", gpus=0))).bundles
    assert [(rank.gpus, rank.gpu_mb, rank.cpu) for rank in ranks] == [
        (1, 8192, 4.0),
        (0, None, 2.0),
        (0, None, 4.0),
    ]


def test_ranks_that_have_gpus_only_by_the_profile_of_the_task_are_found() -> None:
    usual = NamedDefaults(gpus=1)
    for bundles, found in (
        ((Asked(gpus=1), Asked(cpu=2.0)), [1]),
        ((Asked(gpus=1), Asked(cpu=2.0, gpus=0)), []),
        ((Asked(profile="trainer"), Asked(cpu=2.0)), [1]),
        ((Asked(cpu=1.0), Asked(cpu=2.0)), []),
    ):
        asked = Asked(bundles=bundles)
        assert list(ranks_with_gpus_of_profile(asked, demand(usual, bundles=bundles))) == found
