"""Loads at a real Triton run beside one another."""

import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gpubroker import BrokerError

from tests.chaos.forked import ForkedService
from tests.e2e.service_process import until
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


@pytest.mark.parametrize(
    ("slow_seconds", "count"), [(8.0, 2), pytest.param(60.0, 10, marks=pytest.mark.evidence)]
)
def test_quick_models_answer_and_a_broken_one_fails_while_a_slow_one_is_loaded(
    tmp_path: Path, slow_seconds: float, count: int
) -> None:
    with Triton(tmp_path / "triton") as triton, triton.slow_to_load(slow_seconds):
        names = copies(triton, count)
        chosen = settings(triton, "simulated")
        sizes = {name: {"gpu_mb": 512} for name in (*names, "slow", "fails_at_load")}
        chosen["triton"]["servers"][0]["models"] = sizes
        with ForkedService(tmp_path / "data", **chosen) as service, ThreadPoolExecutor() as asking:
            slow = asking.submit(service.broker.load_model, "slow", wait_seconds=2 * slow_seconds)
            until(lambda: state_of(service.broker, "slow") == "loading", "it is being loaded")
            with pytest.raises(BrokerError, match="cannot allocate"):
                service.broker.load_model("fails_at_load", wait_seconds=slow_seconds)
            for name in names:
                began = time.monotonic()
                tensor = infer(service, name)
                print(f"{name} answered after {time.monotonic() - began:.2f} s")
                assert tensor == [1, 2, 3]
            assert state_of(service.broker, "slow") == "loading", "it has been all the time"
            slow.result()
            assert state_of(service.broker, "slow") == "resident"
