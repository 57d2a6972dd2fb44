"""What a run's process keeps of its node's environment."""

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

OF_THE_CLUSTER = {
    "RAY_ADDRESS": "head:6379",
    "RAY_AUTH_MODE": "k8s",
    "RAY_AUTH_TOKEN": "secret of the cluster",
    "RAY_AUTH_TOKEN_PATH": "/secret/of/the/cluster",
}
PROGRAM = """
import json, os, sys
from gpubroker.runtime.process import settle_environment
inherited, given = json.loads(sys.argv[1])
settle_environment(inherited, given)
shown = open("/proc/self/environ", "rb").read().replace(b"\\0", b" ").decode()
print(json.dumps([dict(os.environ), shown]))
"""


def settled(inherited: list[str], given: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """The environment in use, and as the kernel shows it, of a process that had that of the cluster."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([inherited, given])],
        env={**OF_THE_CLUSTER, "RAY_USE_TLS": "1", "PROXY": "for all", "SECRET": "no", "LANG": "C.UTF-8"},
        check=True,
        capture_output=True,
        text=True,
    )
    used, shown = json.loads(done.stdout)
    return used, shown


def test_nothing_of_the_nodes_ray_is_left_even_if_it_is_named() -> None:
    used, shown = settled(["PROXY", *OF_THE_CLUSTER], {})
    assert (used["PROXY"], used["LANG"]) == ("for all", "C.UTF-8")
    assert not {"SECRET", "RAY_USE_TLS", "RAY_AUTH_TOKEN_PATH"} & used.keys()
    for secret in OF_THE_CLUSTER.values():
        assert secret not in used.values()
        assert secret not in shown
    assert "for all" in shown


def test_each_process_has_a_token_for_a_ray_of_its_own() -> None:
    one, other = (settled([], {})[0] for _ in range(2))
    assert (one["RAY_ADDRESS"], one["RAY_AUTH_MODE"]) == ("local", "token")
    assert one["RAY_AUTH_TOKEN"] != other["RAY_AUTH_TOKEN"]


def test_the_operator_may_name_another_ray_for_all_tasks() -> None:
    given: dict[str, Any] = {"RAY_ADDRESS": "of-the-team:6379", "RAY_AUTH_MODE": "disabled"}
    used, _ = settled([], given)
    assert used.items() >= given.items()
