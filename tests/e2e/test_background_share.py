"""The controller of background work on real Ray: the GPUs are as busy as the target says."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpubroker import Broker
from gpubroker.wire.targets import Target

from tests.e2e.hands import Hands
from tests.e2e.service_process import GIB, ServiceProcess, until

QUICK_GAINS = {
    "proportional": 0.1, "integral": 0.4, "derivative": 0, "smoothing_seconds": 0, "filter_seconds": 0,
}  # fmt: skip
"""It settles within seconds. With the gains as shipped that takes minutes: tests/core/control."""
HELD_SECONDS = 2.0
GPUS, FILLERS = 4, 16


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    settings: dict[str, Any] = {
        "fleet": {
            "controller": True, "gains": QUICK_GAINS,
            "target_util_min_percent": 40, "target_util_max_percent": 60,
        },
        "policy": {"sample_period_seconds": 0.2, "beat_seconds": 0.2},
        "simulated_devices": [{"kind": "sim-24g", "memory_mb": 24 * GIB, "count": GPUS}],
        "ray": {"spares": GPUS},
    }  # fmt: skip
    with ServiceProcess(tmp_path / "data", **settings) as service:
        yield service.broker


def test_background_work_keeps_the_gpus_at_their_target(broker: Broker, tmp_path: Path) -> None:
    """It fills half of the GPUs, gives way when other work takes one of them, and comes back after it."""
    hands = Hands(broker, tmp_path)
    for number in range(FILLERS):
        hands.hold(f"filler-{number}", gpus=1, priority="background")

    def running() -> list[str]:
        return sorted(task.name for task in broker.list(state="running") if task.name != "other")

    def holds(count: int) -> bool:
        """So many run, and the GPUs are at their target, until some seconds are over. The controller stops
        nothing, so one too many ends here, as work does, once no other one may follow."""
        over_at = time.monotonic() + HELD_SECONDS
        while len(now := running()) == count and gpu_target(broker).state == "in":
            if time.monotonic() > over_at:
                return True
        if len(now) > count and share(broker) <= count / GPUS:
            (tmp_path / now[0]).touch()
        return False

    until(lambda: holds(2), "half of the GPUs are busy, and stay so")
    assert {broker.explain(task).reason for task in broker.list(state="pending")} == {"BackgroundLimited"}

    other = hands.at_work("other", gpus=1, priority="interactive")
    until(lambda: holds(1), "one has ended, and no other one has followed")
    hands.end(other)
    until(lambda: holds(2), "the GPU of the other work is filled again")


def gpu_target(broker: Broker) -> Target:
    [target] = [one for one in broker.targets() if one.measure == "gpu_utilization"]
    return target


def share(broker: Broker) -> float:
    """What background work may take of the GPUs. A task starts while it has taken less than that."""
    found = gpu_target(broker).background_share
    return 1.0 if found is None else found
