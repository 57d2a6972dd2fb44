"""Loads at a real Triton run beside one another."""

import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gpubroker import BrokerError

from tests.chaos.forked import ForkedService
from tests.e2e.service_process import ServiceProcess, until
from tests.patience import PATIENCE_SECONDS
from tests.triton.server import Triton
from tests.triton.test_residency import infer, settings, state_of


def copies(triton: Triton, count: int) -> Sequence[str]:
    """Of a model that is loaded at once."""
    original = triton.repository / "line_fp32"
    names = [f"quick_{n}" for n in range(count)]
    for name in names:
        shutil.copytree(original, triton.repository / name)
        config = triton.repository / name / "config.pbtxt"
        config.write_text(config.read_text(encoding="utf-8").replace("line_fp32", name), encoding="utf-8")
    return names


def sized(triton: Triton, names: Sequence[str]) -> dict[str, Any]:
    chosen = settings(triton, "simulated")
    chosen["triton"]["servers"][0]["models"] = {name: {"gpu_mb": 512} for name in names}
    return chosen


def answer_quickly(service: ServiceProcess, names: Sequence[str]) -> Sequence[float]:
    """Seconds until each has answered."""
    took = []
    for name in names:
        began = time.monotonic()
        assert infer(service, name) == [1, 2, 3]
        took.append(time.monotonic() - began)
    return took


def test_quick_models_answer_and_a_broken_one_fails_during_a_slow_load(tmp_path: Path) -> None:
    with Triton(tmp_path / "triton") as triton, triton.kept_loading() as end_of_load:
        names = copies(triton, 2)
        chosen = sized(triton, [*names, "slow", "fails_at_load"])
        with ForkedService(tmp_path / "data", **chosen) as service, ThreadPoolExecutor() as asking:
            slow = asking.submit(service.broker.load_model, "slow", wait_seconds=PATIENCE_SECONDS)
            until(lambda: state_of(service.broker, "slow") == "loading", "it is being loaded")
            with pytest.raises(BrokerError, match="cannot allocate"):
                service.broker.load_model("fails_at_load", wait_seconds=PATIENCE_SECONDS)
            answer_quickly(service, names)
            assert state_of(service.broker, "slow") == "loading", "it has been all the time"
            end_of_load.touch()
            assert slow.result().state == "resident"


@pytest.mark.evidence
def test_ten_quick_models_answer_within_two_seconds_during_a_slow_load(tmp_path: Path) -> None:
    """The slow load takes a minute."""
    with Triton(tmp_path / "triton") as triton, triton.slow_to_load(60.0):
        names = copies(triton, 10)
        chosen = sized(triton, [*names, "slow"])
        with ForkedService(tmp_path / "data", **chosen) as service, ThreadPoolExecutor() as asking:
            slow = asking.submit(service.broker.load_model, "slow", wait_seconds=120)
            until(lambda: state_of(service.broker, "slow") == "loading", "it is being loaded")
            took = answer_quickly(service, names)
            print("answered after", *(f"{seconds:.2f}" for seconds in took), "s")
            assert max(took) <= 2.0
            assert state_of(service.broker, "slow") == "loading", "it has been all the time"
            assert slow.result().state == "resident"
