"""What a run sees of the environment of a node that others started."""

from typing import Any

import pytest
from gpubroker import Broker

from tests.e2e.hands import PATIENCE_SECONDS
from tests.e2e.lab.cluster.conftest import ENV_OF_N2
from tests.e2e.ray_lab import Lab

ON_N2: dict[str, Any] = {"nodes": {"node": ["n2"]}}
OF_THE_NODE = {
    "HOME",
    "LANG",
    "LD_LIBRARY_PATH",
    "LOGNAME",
    "PATH",
    "PYTHONPATH",
    "SHELL",
    "TERM",
    "TMPDIR",
} | {
    "TZ",
    "USER",
    "VIRTUAL_ENV",
}
OF_RAY = {"RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}
"""For a Ray of the run's own."""
OF_THE_BROKER = {"LAUNCH_MODE", "LOG_LEVEL", "RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES"}
OF_ITS_OWN_PROCESS = {"GPUBROKER_RUN", "GPUBROKER_INSTANCE", "GPUBROKER_NODE", "GPUBROKER_TASK"} | {
    "GPUBROKER_ATTEMPT"
}


def seen_on_n2(cluster: Broker, **options: Any) -> dict[str, dict[str, str]]:
    task = cluster.submit("tests.e2e.work:surroundings", **ON_N2, **options)
    seen: dict[str, dict[str, str]] = cluster.result(task, timeout_seconds=PATIENCE_SECONDS)
    return seen


@pytest.mark.parametrize("cpu", [0.1, 1])
def test_run_sees_no_other_variables_and_no_secret_of_its_node(
    cluster: Broker, shared_lab: Lab, cpu: float
) -> None:
    """The node was started with five thousand variables."""
    seen = seen_on_n2(cluster, cpu=cpu)
    assert seen["used"]["PROXY_OF_THE_SITE"] == "for all"
    token = (shared_lab.options.data_dir / "ray-token").read_text().strip()
    for place, env in seen.items():
        assert token not in str(env), place
        assert shared_lab.head.address not in str(env), place
        assert env.keys() & ENV_OF_N2.keys() <= {"PROXY_OF_THE_SITE"}, place
        assert ENV_OF_N2["DATABASE_PASSWORD"] not in str(env), place
    assert seen["used"].items() >= {
        ("LAUNCH_MODE", "cluster"),
        ("RAY_ADDRESS", "local"),
        ("LOG_LEVEL", "INFO"),
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("CUDA_VISIBLE_DEVICES", ""),
        ("EXPERIMENT_PATH", "/mnt/experiments"),
        ("WANDB_HOST", "https://wandb.lab"),
    }
    named = {"EXPERIMENT_PATH", "WANDB_HOST", "PROXY_OF_THE_SITE"}
    known = OF_THE_NODE | OF_RAY | OF_THE_BROKER | OF_ITS_OWN_PROCESS | named
    assert not {name for name in seen["of a child"] if not name.startswith("LC_")} - known


def test_the_env_of_a_task_overrides_what_every_task_gets(cluster: Broker) -> None:
    seen = seen_on_n2(cluster, env={"LOG_LEVEL": "DEBUG", "EXPERIMENT_PATH": "/tmp/mine"})
    assert seen["of a child"].items() >= {("LOG_LEVEL", "DEBUG"), ("EXPERIMENT_PATH", "/tmp/mine")}
