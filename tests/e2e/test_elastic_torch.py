"""A PyTorch model that is trained while ranks leave and join, on real Ray, with gloo on CPUs."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.service_process import ROOT, ServiceProcess, until
from tests.patience import PATIENCE_SECONDS

STEPS = 60
TRAIN = "examples.elastic_torch:train"


@pytest.fixture(scope="module")
def packages() -> Path:
    """Of a virtual environment with torch; that of `make gpu`, if it is there."""
    torch, uv = ROOT / ".tools" / "torch", shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")
    if not torch.exists():
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, torch], check=True)
        python = torch / "bin" / "python"
        subprocess.run([uv, "pip", "install", "--quiet", "--python", python, "torch"], check=True)
    [found] = torch.glob("lib/python*/site-packages")
    return found


@pytest.mark.evidence
@pytest.mark.timeout(1200)
def test_model_trained_through_growth_and_shrinking_has_the_same_losses(
    tmp_path: Path, packages: Path
) -> None:
    """They are the losses of a training with one rank."""
    paths = [str(ROOT), str(packages)]
    entrypoints = ["examples.elastic_torch:*", "tests.e2e.work:*"]
    with ServiceProcess(tmp_path / "data", task_path=paths, entrypoints=entrypoints) as service:
        broker = service.broker
        alone = broker.submit(TRAIN, STEPS, bundles=[{"gpu_mb": 1000}])
        expected = broker.result(alone, timeout_seconds=PATIENCE_SECONDS)["losses"]

        options: dict[str, Any] = {"priority": "background", "min_ranks": 2, "grace_seconds": 60}
        gang = broker.submit(TRAIN, STEPS, 0.5, bundles=[{"count": 4, "gpu_mb": 10_000}], **options)

        def goes_on_with(ranks: str) -> bool:
            return f"with ranks [{ranks}]" in "".join(broker.logs(gang))

        until(lambda: goes_on_with("0, 1, 2, 3"), "all four are at work")
        urgent = broker.submit("tests.e2e.work:add", 20, 22, gpu_mb=20_000, priority="critical")
        assert broker.result(urgent, timeout_seconds=PATIENCE_SECONDS) == 42
        until(lambda: goes_on_with("0, 1, 4, 5"), "two others have joined")
        trained = broker.result(gang, timeout_seconds=PATIENCE_SECONDS)
        print(*broker.logs(gang), trained["sizes"])

    assert {2, 4} <= set(trained["sizes"])
    assert trained["losses"] == pytest.approx(expected, rel=1e-9)
    assert trained["losses"][-1] < 0.8 * trained["losses"][0]
