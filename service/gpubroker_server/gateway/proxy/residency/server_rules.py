"""Where servers of models are said to be, and whether there is such a place: a name may be misspelled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from gpubroker_server.core.domain.units import Mib, NodeName, Seconds
from gpubroker_server.core.world.world import World

log = structlog.get_logger("gpubroker.tasks.task")

MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class ModelRules:
    """What the operator says of one model."""

    gpu_mb: Mib | None = None
    priority: int | None = None
    load_seconds: Seconds = Seconds(0.0)


@dataclass(frozen=True, slots=True)
class ServerRules:
    """Where a server's models are, and how they are held."""

    name: str
    node: str
    devices: tuple[str, ...] = ()
    tenant: str = "default"
    priority: int = 79
    grace_seconds: Seconds = Seconds(30.0)
    base_mb: Mib = Mib(0)
    """What the server itself takes, of each of its GPUs."""
    least_mb: Mib = Mib(512)
    cold_seconds: Seconds = Seconds(55.0)
    wanted_seconds: Seconds = Seconds(300.0)
    models: Mapping[str, ModelRules] = field(default_factory=dict)


def place_fault(world: World, rules: ServerRules) -> str:
    """Why nothing can be loaded there, as far as the place goes; empty if there is none."""
    joined = sorted(world.nodes)
    if NodeName(rules.node) not in world.nodes:
        return f'its node "{rules.node}" has not joined the cluster; {_listed("nodes", joined)}'
    uuids = [world.books[key].device.uuid for key in world.by_node.get(NodeName(rules.node), [])]
    if missing := [uuid for uuid in rules.devices if uuid not in uuids]:
        return f"its node {rules.node} has no GPU {missing[0]}; {_listed('GPUs', uuids)}"
    return ""


def _listed(what: str, names: Sequence[str]) -> str:
    more = [f"{len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else []
    return f"there are {', '.join([*names[:MOST_NAMED], *more])}" if names else f"there are no {what} yet"


class PlaceWatch:
    """Logs once of each server that it has no place. Nodes join one after the other: what is missing at two
    looks running, while others have answered, is believed."""

    def __init__(self, world: World, servers: Sequence[ServerRules]) -> None:
        self._world = world
        self._servers = servers
        self._missing: set[str] = set()
        self._told: set[str] = set()

    def look(self) -> None:
        world = self._world
        if not any(node.ready for node in world.nodes.values()):
            return
        faults = {rules.name: place_fault(world, rules) for rules in self._servers}
        missing = {name for name, fault in faults.items() if fault}
        for name in sorted((missing & self._missing) - self._told):
            log.warning("the models of a server cannot be loaded", server=name, fault=faults[name])
        self._told = (self._told | self._missing) & missing
        self._missing = missing
