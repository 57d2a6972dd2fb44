"""Which kind a device is of, by what its driver calls it."""

import pytest
from gpubroker.wire.policy import GpuKind
from gpubroker_server.core.domain.device import SHIPPED_KINDS, is_of_kind, kind_of


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 5090", "5090"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA GeForce RTX 4090", "4090"),
    ],
)
def test_shipped_kinds_are_found_in_what_drivers_report(reported: str, name: str) -> None:
    kind = kind_of(reported, SHIPPED_KINDS)
    assert kind is not None
    assert kind.name == name


def test_a_kind_is_found_by_whole_words_only() -> None:
    assert not is_of_kind("NVIDIA L40S", "L40")
    assert is_of_kind("NVIDIA RTX A6000", "rtx a6000")
    assert not is_of_kind("NVIDIA RTX 6000 Ada", "RTX A6000")
    assert kind_of("NVIDIA L40S", SHIPPED_KINDS) is None


def test_the_longest_matching_kind_wins() -> None:
    kinds = (GpuKind("H100", 2000), GpuKind("H100 80GB", 2100))
    assert kind_of("NVIDIA H100 80GB HBM3", kinds) == kinds[1]
