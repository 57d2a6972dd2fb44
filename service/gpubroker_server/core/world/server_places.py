"""Checks that the node and the GPUs of a model server exist as the settings name them."""

from collections.abc import Sequence
from typing import Final

from gpubroker_server.core.domain.models import gpus_fault
from gpubroker_server.core.domain.server_rules import ServerRules
from gpubroker_server.core.domain.units import NodeName
from gpubroker_server.core.world.ledger import DeviceLedger
from gpubroker_server.core.world.world import World

_MAX_NAMED: Final = 8


def gpus_of(world: World, rules: ServerRules) -> list[DeviceLedger]:
    """Return the GPUs that the server may use, as far as the settings say."""
    ledgers = (world.ledgers[key] for key in world.by_node.get(NodeName(rules.node), ()))
    return [
        ledger
        for ledger in ledgers
        if (ledger.device.uuid in rules.devices if rules.devices else ledger.device.offers)
    ]


def place_fault(world: World, rules: ServerRules) -> str:
    """Say what is wrong with the server's node and GPUs; empty if nothing is."""
    joined = sorted(world.nodes)
    if NodeName(rules.node) not in world.nodes:
        return f'its node "{rules.node}" has not joined the cluster; {_listed("nodes", joined)}'
    uuids = [world.ledgers[key].device.uuid for key in world.by_node.get(NodeName(rules.node), [])]
    if missing := [uuid for uuid in rules.devices if uuid not in uuids]:
        return f"its node {rules.node} has no GPU {missing[0]}; {_listed('GPUs', uuids)}"
    seen = [] if rules.tells_gpus else [ledger.device.uuid for ledger in gpus_of(world, rules)]
    faults = [
        gpus_fault(rules.name, seen, gpus) for gpus in sorted({1, *(m.gpus for m in rules.models.values())})
    ]
    return next(filter(None, faults), "") if all(faults) else ""


def _listed(noun: str, names: Sequence[str]) -> str:
    more = [f"{len(names) - _MAX_NAMED} more"] if len(names) > _MAX_NAMED else []
    return f"there are {', '.join([*names[:_MAX_NAMED], *more])}" if names else f"there are no {noun} yet"
