from typing import Any

import pytest
from gpubroker import Gpu
from gpubroker.cli.gpu_commands import GpuTable, bar, parts_of
from gpubroker.transport.decoding import decode
from rich.console import Console

GIB = 1024


def a_gpu(**more: Any) -> Gpu:
    named = {"key": "local/n1/GPU-1", "uuid": "GPU-1", "node": "n1", "kind": "sim"}
    return decode(Gpu, {**named, "physical_mb": 24 * GIB, **more})


def test_a_bar_distinguishes_used_leased_and_free_memory() -> None:
    gpu = a_gpu(leased_mb=18 * GIB, used_mb=12 * GIB, free_mb=6 * GIB)
    assert bar(gpu, width=24) == "█" * 12 + "▒" * 6 + "░" * 6


def test_memory_used_without_a_lease_is_drawn_as_foreign() -> None:
    gpu = a_gpu(leased_mb=12 * GIB, used_mb=18 * GIB, foreign_mb=4 * GIB, unaccounted_mb=2 * GIB)
    assert bar(gpu, width=24) == "█" * 12 + "░" * 6 + "!" * 6


def test_memory_pledged_to_a_waiting_task_is_not_drawn_as_free() -> None:
    pledges = [{"task": "task_9", "gpu_mb": 20 * GIB, "arrived_mb": 12 * GIB}]
    assert bar(a_gpu(pledges=pledges), width=24) == "▓" * 12 + "░" * 12


def test_a_very_small_part_is_drawn_and_the_bar_keeps_its_width() -> None:
    gpu = a_gpu(leased_mb=23 * GIB, used_mb=2, foreign_mb=1)
    drawn = bar(gpu, width=10)
    assert len(drawn) == 10
    assert set(drawn) == set("█▒░!")


@pytest.mark.parametrize("numbers", [{"leased_mb": 30 * GIB}, {"foreign_mb": 30 * GIB, "leased_mb": GIB}, {}])
def test_the_parts_add_up_to_the_whole_for_any_measurement(numbers: dict[str, int]) -> None:
    part = parts_of(a_gpu(**numbers))
    assert part.used + part.reserved + part.pledged + part.foreign + part.free == 24 * GIB
    assert min(part.used, part.reserved, part.pledged, part.foreign, part.free) >= 0


def test_gpu_line_names_its_holders_and_the_task_memory_is_freed_for() -> None:
    gpu = a_gpu(
        leased_mb=14 * GIB,
        free_mb=10 * GIB,
        holders=[{"kind": "run", "id": "task_1", "name": "train", "gpu_mb": 14 * GIB, "stopping": True}],
        pledges=[{"task": "task_00000009", "gpu_mb": 20 * GIB, "arrived_mb": 0}],
    )
    out = Console(width=1000)
    with out.capture() as captured:
        out.print(GpuTable([gpu]))
    assert "10.0 GiB free of 24.0" in captured.get()
    assert "train 14.0 GiB (stopping)" in captured.get()
    assert "0.0 GiB of 20.0 GiB freed for 00000009" in captured.get()


def test_a_gpu_line_says_how_busy_and_hot_it_is_and_warns_of_errors() -> None:
    health = {"power_watts": 412.4, "temperature_celsius": 61.0, "ecc_errors": 0, "xid": None}
    assert "90% busy · 412 W · 61 °C" in shown(a_gpu(utilization=0.9, health=health))
    assert "!" not in shown(a_gpu(health=health)).partition("█")[0]
    assert "! 2 ECC errors · ! XID 79" in shown(a_gpu(health={**health, "ecc_errors": 2, "xid": 79}))


def shown(gpu: Gpu) -> str:
    out = Console(width=1000)
    with out.capture() as captured:
        out.print(GpuTable([gpu]))
    return captured.get()
