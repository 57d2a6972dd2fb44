"""The settings of model servers with models in the ledger, and whether their nodes and GPUs exist: a name may
be misspelled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from gpubroker_server.core.domain.models import gpus_fault
from gpubroker_server.core.domain.units import Mib, NodeName, Seconds
from gpubroker_server.core.world.ledger import DeviceLedger
from gpubroker_server.core.world.world import World

log = structlog.get_logger("gpubroker.tasks.task")

_MOST_NAMED: Final = 8


@dataclass(frozen=True, slots=True)
class ModelRules:
    gpu_mb: Mib | None = None
    priority: int | None = None
    load_seconds: Seconds = Seconds(0.0)
    gpus: int = 1
    """On so many it takes `gpu_mb` each."""


@dataclass(frozen=True, slots=True)
class ServerRules:
    name: str
    node: str
    devices: tuple[str, ...] = ()
    """UUIDs; empty: all of the node."""
    tells_gpus: bool = False
    """Its metrics tell which GPUs it sees."""
    tenant: str = "default"
    priority: int = 79
    grace_seconds: Seconds = Seconds(30.0)
    base_mb: Mib = Mib(0)
    """What the server itself takes, of each of its GPUs."""
    least_mb: Mib = Mib(512)
    cold_seconds: Seconds = Seconds(55.0)
    wanted_seconds: Seconds = Seconds(300.0)
    models: Mapping[str, ModelRules] = field(default_factory=dict)


def gpus_of(world: World, rules: ServerRules) -> list[DeviceLedger]:
    """The GPUs that the server may use, as far as the settings say."""
    ledgers = (world.ledgers[key] for key in world.by_node.get(NodeName(rules.node), ()))
    return [
        one for one in ledgers if (one.device.uuid in rules.devices if rules.devices else one.device.offers)
    ]


def place_fault(world: World, rules: ServerRules) -> str:
    """What is wrong with the server's node and GPUs; empty if nothing is."""
    joined = sorted(world.nodes)
    if NodeName(rules.node) not in world.nodes:
        return f'its node "{rules.node}" has not joined the cluster; {_listed("nodes", joined)}'
    uuids = [world.ledgers[key].device.uuid for key in world.by_node.get(NodeName(rules.node), [])]
    if missing := [uuid for uuid in rules.devices if uuid not in uuids]:
        return f"its node {rules.node} has no GPU {missing[0]}; {_listed('GPUs', uuids)}"
    seen = [] if rules.tells_gpus else [one.device.uuid for one in gpus_of(world, rules)]
    each = [
        gpus_fault(rules.name, seen, gpus) for gpus in sorted({1, *(m.gpus for m in rules.models.values())})
    ]
    return next(filter(None, each), "") if all(each) else ""


def _listed(what: str, names: Sequence[str]) -> str:
    more = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return f"there are {', '.join([*names[:_MOST_NAMED], *more])}" if names else f"there are no {what} yet"


class PlaceChecks:
    """Logs once of each server that it has no place. Nodes join one after the other: a place counts as
    missing when it is missing in two checks running, while other nodes have joined."""

    def __init__(self, world: World, servers: Sequence[ServerRules]) -> None:
        self._world = world
        self._servers = servers
        self._missing: set[str] = set()
        self._logged: set[str] = set()

    def check(self) -> None:
        world = self._world
        if not any(node.ready for node in world.nodes.values()):
            return
        faults = {rules.name: place_fault(world, rules) for rules in self._servers}
        missing = {name for name, fault in faults.items() if fault}
        for name in sorted((missing & self._missing) - self._logged):
            log.warning("the models of a server cannot be loaded", server=name, fault=faults[name])
        self._logged = (self._logged | self._missing) & missing
        self._missing = missing
