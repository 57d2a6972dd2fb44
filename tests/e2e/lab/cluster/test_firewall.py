"""A firewall between two Ray nodes is found, although both answer the leader."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from gpubroker import Broker
from gpubroker.wire.fleet import Finding
from gpubroker_server.adapters.ray.driver.process import TRY_SECONDS

from tests.e2e.ray_lab import Lab, guest_environment
from tests.e2e.ray_node import RayNode
from tests.e2e.service_process import environment, until
from tests.patience import PATIENCE_SECONDS

PORT_OF = """
import ray
ray.init(address={address!r}, log_to_driver=False)
print(*(it["ObjectManagerPort"] for it in ray.nodes() if it["NodeName"] == {name!r} and it["Alive"]))
"""


def object_manager_port(address: str, name: str, env: Mapping[str, str]) -> str:
    asked = [sys.executable, "-c", PORT_OF.format(address=address, name=name)]
    told = subprocess.run(asked, env=environment(**env), capture_output=True, text=True, check=True)
    return told.stdout.strip()


@contextmanager
def a_firewall(port: str) -> Iterator[None]:
    """New connections to this port get no answer. Needs the right to change the firewall."""
    rule = ["OUTPUT", "-o", "lo", "-p", "tcp", "--dport", port, "--syn", "-j", "DROP"]
    subprocess.run(["iptables", "-I", *rule], check=True)
    try:
        yield
    finally:
        subprocess.run(["iptables", "-D", *rule], check=True)


@pytest.mark.evidence
@pytest.mark.provokes("node-unreachable-from-node")
def test_node_that_other_nodes_cannot_reach_is_named_until_they_can(
    cluster: Broker, shared_lab: Lab, second_node: RayNode
) -> None:
    """It is the port of its object manager that others cannot reach."""
    env = guest_environment(shared_lab.options.data_dir)
    port = object_manager_port(shared_lab.head.address, second_node.name, env)

    def named() -> list[Finding]:
        return [one for one in cluster.diagnostics() if one.kind == "node-unreachable-from-node"]

    seconds = 2 * TRY_SECONDS + PATIENCE_SECONDS
    with a_firewall(port):
        until(lambda: bool(named()), "it is found", seconds)
        [found] = named()
        assert (found.subject, found.evidence) == (second_node.name, {"nodes": 1})
        assert f"127.0.0.1:{port} of n2, which answers the leader: no answer within 3 s" in found.cause
        assert all(node.ready for node in cluster.nodes())
    until(lambda: not named(), "the way is open again", seconds)
