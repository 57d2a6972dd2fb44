"""Starts Ray's processes of a node on 127.0.0.1. This is the only module that uses private parts of Ray.

tests/architecture/test_private_imports.py pins the release of Ray and says what would replace them.
"""

import os
import random
import socket
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._raylet import get_port_filename  # type: ignore[attr-defined]  # compiled

from gpubroker_server.adapters.ray.head.node_to_start import LOCALHOST, NodeToStart

_AGENT_PORTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)
"""The names of the parameters for the agents' ports, and of the files in which the agents write their ports
for the raylet."""

_OWN_RANGE = 20_000, 32_000


class ToldNode(Node):
    """A node that writes the files with its agents' ports before its raylet starts, if these ports were
    chosen."""

    def start_raylet(self, *arguments: Any, **named: Any) -> Any:
        for name in _AGENT_PORTS:
            if port := getattr(self._ray_params, name):
                session = str(self.get_session_dir_path())  # type: ignore[no-untyped-call]  # Ray's
                told = Path(session, get_port_filename(self._node_id, name))
                told.write_text(str(port))
        return super().start_raylet(*arguments, **named)


class HeadWithoutDashboard(ToldNode):
    """A head that does not start the dashboard's server. `Node` starts it and waits for it even with
    `include_dashboard=False`."""

    def start_api_server(self, **_: Any) -> None:
        """Do nothing: no run needs the dashboard."""


def start_node(node: NodeToStart) -> tuple[str, str]:
    """Start a node. Returns, once it is up, the `host:port` of the head and that of its dashboard, which is
    empty if there is none. The node's processes outlive this one.

    `ray start` would do this too, but it imports Ray Serve (1.5 s of CPU), starts the dashboard, opens a Ray
    Client server on port 10001 where grpc is installed, and refuses to join a head on 127.0.0.1.

    Port 0 lets the kernel choose a port at the moment of binding, so that a port in use is never chosen and
    two nodes never collide. A port that is chosen here for an agent may be taken before the agent binds it:
    then the start fails, and the next start chooses other ports.
    """
    ports = _free_ports() if node.chooses_ports else repeat(0)
    params = RayParams(
        node_ip_address=LOCALHOST,
        node_name=node.name,
        gcs_address=node.head or None,
        gcs_server_port=None if node.head else node.port,
        node_manager_port=0,
        object_manager_port=0,
        metrics_agent_port=next(ports),
        metrics_export_port=next(ports),
        dashboard_agent_listen_port=next(ports),
        runtime_env_agent_port=next(ports),
        min_worker_port=0,
        max_worker_port=0,
        ray_client_server_port=None,
        include_dashboard=node.dashboard,
        dashboard_host=LOCALHOST,
        dashboard_port=None,  # 8265, or the next one that is free
        include_log_monitor=False,  # type: ignore[arg-type]  # its annotation is wrong
        no_monitor=True,
        num_cpus=os.cpu_count() or 1 if node.cpus is None else node.cpus,
        num_gpus=node.gpus,
        resources=dict(node.resources),
        object_store_memory=node.object_store_bytes,
        temp_dir=None if node.temp_dir is None else str(node.temp_dir),
    )
    kind = ToldNode if node.head or node.dashboard else HeadWithoutDashboard
    started = kind(params, head=not node.head, shutdown_at_exit=False, spawn_reaper=False)
    return str(started.address), str(started.webui_url) if node.dashboard else ""


def _free_ports() -> Iterator[int]:
    """Yield ports on which nothing listens. They are below the range from which the kernel assigns ports."""
    while True:
        port = random.randrange(*_OWN_RANGE)  # noqa: S311  # no secret
        with socket.socket() as asking:
            try:
                asking.bind((LOCALHOST, port))
            except OSError:
                continue
        yield port
