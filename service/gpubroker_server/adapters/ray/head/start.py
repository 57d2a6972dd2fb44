"""`ray start` with what a local head needs and no more.

Started as `python -m gpubroker_server.adapters.ray.head.start start …`.

Ray's command line imports all of Ray Serve for commands that nobody gives here, and waits for a server of its
dashboard, which it starts even where it is told to do without a dashboard. That was most of a head's start.
"""

import sys
from pathlib import Path
from typing import Any

from gpubroker_server.adapters.ray.head.head import WORKER_FILE
from gpubroker_server.adapters.ray.head.ray_worker import SELDOM_USED, put_off

OTHER_COMMANDS = ("ray.dashboard.modules.job.cli", "ray.serve.scripts")
"""Ray's command line goes on without those that cannot be imported."""


def prepare(ray_params: Any, _head: bool) -> None:
    """Ray's start hook. Where grpc is installed Ray would open a client server on port 10001, unasked."""
    ray_params.ray_client_server_port = None
    ray_params.worker_path = str(Path(ray_params.temp_dir).with_name(WORKER_FILE))


def main() -> None:
    sys.modules.update(dict.fromkeys(OTHER_COMMANDS))  # type: ignore[arg-type]  # None: it cannot be imported
    with put_off(SELDOM_USED):
        from ray._private.node import Node
        from ray.scripts.scripts import cli

    Node.start_api_server = lambda *_, **__: None  # type: ignore[method-assign]  # Ray has no option for it
    cli()


if __name__ == "__main__":
    main()
