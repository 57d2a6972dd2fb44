"""What a task asks for."""

from functools import lru_cache

from gpubroker_server.core.domain.units import Mib
from gpubroker_server.core.domain.values import value

Labels = tuple[tuple[str, tuple[str, ...]], ...]
"""(label, values), sorted: one value of each. The label `node` is the node's name."""


@value
class Where:
    """Which devices and nodes a task may use (all of it must hold) and which it would rather have."""

    kinds: tuple[str, ...] = ()
    """One of these; names as operators and drivers use them."""
    min_power: int = 0
    min_device_mb: Mib = Mib(0)
    """Physical memory."""
    nodes: Labels = ()
    devices: tuple[str, ...] = ()
    """One of these, by UUID; sorted."""
    prefer_kinds: tuple[str, ...] = ()
    """Best first. A preference orders placements and never forbids one."""
    prefer_nodes: Labels = ()


ANYWHERE = Where()


@value
class Demand:
    """Sizes are per device; `cpu` and `memory_mb` are of the one node that the task runs on.

    `gpus` devices of `gpu_mb` MiB each; with neither `gpu_mb` nor `gpu_fraction`, whole devices.
    `custom` is sorted by name, so that equal demands compare and hash equal.
    """

    gpus: int = 0
    gpu_mb: Mib | None = None
    gpu_fraction: float | None = None
    exclusive: bool = False
    cpu: float = 0.0
    memory_mb: Mib = Mib(0)
    custom: tuple[tuple[str, float], ...] = ()
    placement: str = "pack"
    where: Where = ANYWHERE
    pool: str = ""
    slots: tuple[tuple[str, float], ...] = ()
    """What it counts of limits that many tasks share, sorted by name."""
    bundles: tuple["Demand", ...] = ()
    """Of a gang: what each rank asks for, all of which run together. Beside them the gang itself says only
    `custom` (the sum), `slots` and `pool`."""
    strategy: str = "pack"
    """How ranks lie on nodes: `pack` on as few as may be, `spread` on as many, `strict_pack` on one,
    `strict_spread` each on its own."""
    min_ranks: int | None = None
    """With so many of its ranks, the first ones, a gang runs as well; None: with all."""
    answered_by: str = ""
    """The model of a server that is to answer: such a task takes nothing of nodes or devices, since the model
    holds what it takes."""

    @property
    def least_ranks(self) -> int:
        return len(self.bundles) if self.min_ranks is None else self.min_ranks

    @property
    def counted(self) -> tuple[tuple[str, float], ...]:
        """All of which the cluster, or one of its nodes, has only so much."""
        return self.custom + self.slots

    @property
    def takes_whole_devices(self) -> bool:
        return self.gpus > 0 and (self.exclusive or (self.gpu_mb is None and self.gpu_fraction is None))


@lru_cache(4096)
def shared(demand: Demand) -> Demand:
    """The one for all that equal it. Tasks come in many, demands in few kinds: it is kept once, and equal
    ones need not be compared field by field."""
    return demand
