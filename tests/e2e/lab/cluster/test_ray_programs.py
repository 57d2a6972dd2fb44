"""An ordinary Ray program on two nodes of the service, as a Ray cluster of its own."""

import json
import sys
from pathlib import Path

from gpubroker import Broker

from tests.e2e.service_process import until
from tests.patience import PATIENCE_SECONDS

EXAMPLE = Path(__file__).parents[4] / "examples" / "ray_reinforcement.py"
RAY_SECONDS = 4 * PATIENCE_SECONDS
"""A busy machine takes a minute to start a node of Ray."""


def test_reinforcement_on_two_nodes_is_preempted_and_resumes(cluster: Broker, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    command = [sys.executable, str(EXAMPLE), "--state", str(state)]
    task = cluster.submit(
        command,
        ray=True,
        bundles=[{"count": 2, "cpu": 1, "gpus": 1, "kinds": ["sim-big"]}],
        strategy="strict_spread",
        priority="batch",
        grace_seconds=RAY_SECONDS,
    )
    until(state.exists, "it has saved its state once", RAY_SECONDS)
    urgent = cluster.submit("tests.e2e.work:add", 1, 2, gpus=1, kinds=["sim-big"], priority="critical")
    assert cluster.result(urgent, timeout_seconds=RAY_SECONDS) == 3
    ended = cluster.wait(task, timeout_seconds=RAY_SECONDS)
    outcome = cluster.outcome(task)
    assert ended.state == "succeeded", f"{outcome.error and outcome.error.message}\n{outcome.log_tail}"
    assert "on 2 nodes" in outcome.log_tail
    known = json.loads(state.read_text())
    assert known["iteration"] == 60
    assert known["success"] > 0.9
    begun, resumed = known["starts"]
    assert begun == 0
    assert 10 <= resumed <= 60
    assert ended.preemptions == 1
    until(lambda: all(gpu.leased_mb == 0 for gpu in cluster.gpus()), "all memory is back")
