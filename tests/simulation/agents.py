"""Agents and processes of a scripted story: nothing happens by itself."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpubroker_server.core.domain.device import DeviceSample, Node
from gpubroker_server.core.domain.orders import Report, ReportedDevice, RunId, StartOrder
from gpubroker_server.core.domain.units import DeviceKey, Instant, Mib, NodeName, mark_of
from gpubroker_server.core.world.world import World


@dataclass
class Process:
    """One rank of a run, as it is on its node."""

    order: StartOrder
    has_begun: bool = False
    is_ready: bool = False
    goes: bool = False
    """Its user code runs: it has no barrier, or got the GoOrder."""
    has_ended: bool = False
    stop_at: float | None = None
    """When its agent kills it; a stuck process survives that."""
    is_stuck: bool = False
    checkpoints: int = 0

    @property
    def id(self) -> RunId:
        return self.order.task, self.order.fence, self.order.rank


class Agent:
    """A node and its agent: what runs there, and what it would tell a leader again."""

    def __init__(self, node: Node, devices: Sequence[ReportedDevice], keys: Sequence[DeviceKey]) -> None:
        self.node = node
        self.devices = tuple(devices)
        self.keys = tuple(keys)
        self.is_heard = True
        self.processes: dict[RunId, Process] = {}
        self.told: dict[RunId, list[Report]] = {}
        """Its reports of each run with an outcome that is not forgotten."""
        self.forgotten: set[RunId] = set()
        self.started: set[RunId] = set()

    def used_mb(self) -> dict[DeviceKey, dict[str, Mib]]:
        used: dict[DeviceKey, dict[str, Mib]] = {key: {} for key in self.keys}
        for process in self.processes.values():
            for device, mb in process.order.devices:
                used[device][mark_of(*process.id)] = mb
        return used

    def samples(self, now: Instant) -> tuple[DeviceSample, ...]:
        return tuple(
            DeviceSample(key, now, Mib(sum(holders.values())), by_holder=holders)
            for key, holders in self.used_mb().items()
        )


def agent_of(world: World, name: NodeName) -> Agent:
    keys = world.by_node.get(name, [])
    devices = [world.ledgers[key].device for key in keys]
    seen = [ReportedDevice(d.uuid, d.kind, d.index, d.physical_mb, d.simulated) for d in devices]
    return Agent(world.nodes[name], seen, keys)
