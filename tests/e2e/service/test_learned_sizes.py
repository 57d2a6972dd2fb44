"""Runs are measured on real Ray, what they used is learned, and one that takes more than that is stopped."""

from pathlib import Path
from typing import Any

import pytest
from gpubroker import Broker, Task

from tests.e2e.service_process import until
from tests.patience import PATIENCE_SECONDS


def using(broker: Broker, mb: int, flag: Path, gpu_mb: Any) -> Task:
    """A command of model type resnet that uses so much of a simulated GPU until the flag is there."""
    wait = f"until [ -e {flag} ]; do sleep 0.02; done"
    env = {"SIMULATED_GPU_MB": str(mb)}
    return broker.submit(["sh", "-c", wait], model_type="resnet", gpu_mb=gpu_mb, env=env, grace_seconds=5)


def measured(broker: Broker) -> list[int | None]:
    return [holder.measured_mb for gpu in broker.gpus() for holder in gpu.holders]


def test_what_runs_used_is_given_to_the_next_and_it_must_not_use_more(broker: Broker, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    # Less than they use, as far as that is tolerated: until its command begins, a run uses what it leases.
    runs = [using(broker, 4096, flag, gpu_mb=4000) for _ in range(3)]
    until(lambda: measured(broker) == [4096] * 3, "all three runs are measured")
    flag.touch()
    for run in runs:
        assert broker.wait(run, timeout_seconds=PATIENCE_SECONDS).state == "succeeded"
    [known] = broker.estimates("resnet")
    assert known.gpu_mb is not None
    assert (known.kind, known.gpu_mb.n, known.gpu_mb.p95) == ("sim-24g", 3, pytest.approx(4096, rel=0.02))

    greedy = using(broker, 9000, tmp_path / "never", gpu_mb="learned")
    assert greedy.sizing is not None
    assert greedy.sizing.gpu_mb == greedy.resources.gpu_mb == pytest.approx(1.15 * 4096, rel=0.02)
    ended = broker.wait(greedy, timeout_seconds=PATIENCE_SECONDS)
    assert ended.state == "failed"
    assert ended.error is not None
    assert ended.error.kind == "over_use"
    [event] = [event for event in broker.events(greedy) if event.kind == "lease.overused"]
    assert event.fields["overused_mb"] == 9000
    [known] = broker.estimates("resnet")
    assert known.gpu_mb is not None
    assert (known.gpu_mb.n, known.gpu_mb.p95) == (4, pytest.approx(9000, rel=0.02))
