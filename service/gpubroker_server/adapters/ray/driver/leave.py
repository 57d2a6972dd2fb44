"""Ends the node agents of this service on a joined cluster, and with them its runs and runners.

The program is started as `python -m gpubroker_server.adapters.ray.driver.leave ADDRESS NAMESPACE`, and
prints the number of agents.
"""

import logging
import os
import subprocess
import sys

from gpubroker_server.adapters.ray.head.head import ray_environment
from gpubroker_server.adapters.ray.options import RayOptions

LEAVE_SECONDS = 30.0
"""The time that one agent gets to end all runs of its node."""
MAX_SECONDS = 120.0


class CannotLeave(Exception):
    """The cluster cannot be reached, or an agent did not end. The message says which."""


def leave_cluster(options: RayOptions) -> int:
    """End the agents of this service and return their number. Raises CannotLeave."""
    command = [sys.executable, "-m", __name__, str(options.address), options.namespace]
    try:
        ended = subprocess.run(  # noqa: S603  # our own module
            command, check=False, env={**os.environ, **ray_environment(options)},
            capture_output=True, text=True, timeout=MAX_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise CannotLeave(f"Ray at {options.address} did not answer within {MAX_SECONDS:g} s") from None
    if ended.returncode != 0:
        last = ended.stderr.strip().rpartition("\n")[2]
        raise CannotLeave(f"the node agents on Ray at {options.address} could not be ended: {last}")
    return int(ended.stdout.split()[-1])


def main() -> None:
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    address, namespace = sys.argv[1:]
    ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)
             if actor["namespace"] == namespace and actor["name"].startswith("agent/")]  # fmt: skip
    for name in names:
        try:
            ray.get(ray.get_actor(name).leave.remote(), timeout=LEAVE_SECONDS)
        except GetTimeoutError:
            sys.exit(f"{name} has not ended within {LEAVE_SECONDS:g} s")
        except (RayError, ValueError):
            continue  # the agent has ended its own process before it could answer
    print(len(names))


if __name__ == "__main__":
    main()
