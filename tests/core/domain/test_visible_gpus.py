"""A list of GPUs means what CUDA says of CUDA_VISIBLE_DEVICES."""

import pytest
from gpubroker_server.core.domain.visible_gpus import GpuNames, NamedTwice, VisibleGpu, visible_gpus

GPUS = (
    GpuNames("GPU-8932f937"),
    GpuNames("GPU-89aa0000"),
    GpuNames("GPU-c0ffee00", ("MIG-11aa", "MIG-11bb", "MIG-22cc")),
)


def numbers(words: str) -> list[int]:
    return [gpu.number for gpu in visible_gpus(words, GPUS)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("0,2", [0, 2]),
        ("2, 0", [2, 0]),
        ("GPU-8932f937", [0]),
        ("GPU-893,GPU-c", [0, 2]),
        ("GPU-89aa,0", [1, 0]),
    ],
)
def test_indexes_uuids_and_unique_beginnings_name_gpus_in_their_order(
    words: str, expected: list[int]
) -> None:
    assert numbers(words) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", []),
        ("-1", []),
        ("0,-1,1", [0]),
        ("0,3,1", [0]),
        ("1,GPU-89,0", [1]),
        ("0,GPU-,1", [0]),
        ("0,,1", [0]),
        ("0,gpu-8932f937,1", [0]),
        ("NoDevFiles", []),
        ("none", []),
        ("0,1x,1", [0]),
    ],
)
def test_the_list_ends_at_the_first_invalid_entry(words: str, expected: list[int]) -> None:
    assert numbers(words) == expected


def test_instances_are_named_by_uuid_and_joined_by_gpu() -> None:
    assert visible_gpus("MIG-11bb", GPUS) == [VisibleGpu(2, ("MIG-11bb",))]
    assert visible_gpus("MIG-22,0,MIG-11aa", GPUS) == [VisibleGpu(2, ("MIG-22cc", "MIG-11aa")), VisibleGpu(0)]
    assert visible_gpus("0,MIG-11,1", GPUS) == [VisibleGpu(0)], "two instances begin so"


@pytest.mark.parametrize("words", ["0,0", "0,1,GPU-8932", "MIG-11aa,MIG-11a", "2,MIG-11aa", "MIG-11aa,2"])
def test_a_gpu_that_is_named_twice_is_refused(words: str) -> None:
    with pytest.raises(NamedTwice, match="twice"):
        visible_gpus(words, GPUS)


def test_a_gpu_that_does_not_answer_may_be_the_one_that_is_named() -> None:
    gpus = (GpuNames("GPU-a"), GpuNames(""), GpuNames("GPU-c"))
    assert visible_gpus("GPU-b,GPU-c", gpus) == [VisibleGpu(1, ("GPU-b",)), VisibleGpu(2)]
    assert visible_gpus("1", gpus) == [VisibleGpu(1)]


def test_a_whole_uuid_goes_before_one_that_begins_with_it() -> None:
    assert visible_gpus("GPU-a", (GpuNames("GPU-ab"), GpuNames("GPU-a"))) == [VisibleGpu(1)]
