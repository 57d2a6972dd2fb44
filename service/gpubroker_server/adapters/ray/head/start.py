"""Start Ray's head processes on 127.0.0.1. The only module that uses private parts of Ray.

tests/architecture/test_private_imports.py pins the release of Ray and says what would replace them.
"""

import os
from pathlib import Path
from typing import Any

from ray._private.node import Node
from ray._private.parameter import RayParams

LOCALHOST = "127.0.0.1"


class HeadNode(Node):
    """`Node` starts a server of the dashboard even with `include_dashboard=False`, and waits for it."""

    def start_api_server(self, **_: Any) -> None:
        """No run needs the dashboard."""


def start_head(temp_dir: Path, object_store_bytes: int) -> str:
    """Back when Ray is up, with its `host:port`. Its processes outlive this one.

    `ray start` would do the same, but it imports Ray Serve (1.5 s of CPU), starts the dashboard, and opens a
    Ray Client server on port 10001 where grpc is installed.
    """
    params = RayParams(
        node_ip_address=LOCALHOST,
        node_name=LOCALHOST,
        gcs_server_port=0,
        min_worker_port=0,
        max_worker_port=0,
        ray_client_server_port=None,
        include_dashboard=False,
        include_log_monitor=False,  # type: ignore[arg-type]  # its annotation is wrong
        no_monitor=True,
        num_cpus=os.cpu_count() or 1,
        num_gpus=0,
        object_store_memory=object_store_bytes,
        temp_dir=str(temp_dir),
    )
    return str(HeadNode(params, head=True, shutdown_at_exit=False, spawn_reaper=False).address)
