"""Runner processes as Ray knows them. Every call here blocks for as long as Ray's control service does."""

from collections.abc import Callable
from typing import Any, Protocol
from uuid import uuid4

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gpubroker_server.adapters.ray.agent.runner import Runner
from gpubroker_server.adapters.ray.options import AgentConfig


class Runners(Protocol):
    """Those of one node. Handles have the methods of `runner.Runner`, each with a `remote(...)` to await."""

    node: str
    """Ray's id of the node: another one means another Ray."""
    host: str
    """Where other nodes reach this one."""

    def make(self, *, shared: bool) -> tuple[str, Any]:
        """Name and handle of a new one, which may still be starting."""
        ...

    def names(self) -> list[str]:
        """Of those that are alive."""
        ...

    def find(self, name: str) -> Any | None: ...

    def kill(self, runner: Any) -> None: ...


class RayRunners:
    """Implements `Runners` with detached actors: they outlive the agent that made them."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._prefix = f"runner/{config.node}/"
        self.node: str = ray.get_runtime_context().get_node_id()
        self.host = _address_of(self.node)

    def make(self, *, shared: bool) -> tuple[str, Any]:
        config = self._config
        name = f"{self._prefix}{uuid4().hex[:8]}"
        options = {
            "name": name,
            "namespace": config.namespace,
            "lifetime": "detached",
            "num_cpus": 0,
            "num_gpus": 0,
            "max_restarts": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self.node, soft=False),
        }
        actor = ray.remote(Runner).options(**options)
        return name, actor.remote(config.task_path, shared=shared, user=config.task_user)

    def names(self) -> list[str]:
        named = ray.util.list_named_actors(all_namespaces=True)
        ours = (actor["name"] for actor in named if actor["namespace"] == self._config.namespace)
        return [name for name in ours if name.startswith(self._prefix)]

    def find(self, name: str) -> Any | None:
        try:
            return ray.get_actor(name, self._config.namespace)
        except ValueError:
            return None

    def kill(self, runner: Any) -> None:
        ray.kill(runner)


def _address_of(node_id: str) -> str:
    list_nodes: Callable[[], list[dict[str, Any]]] = ray.nodes
    [address] = (node["NodeManagerAddress"] for node in list_nodes() if node["NodeID"] == node_id)
    return str(address)
