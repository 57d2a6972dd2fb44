"""What a task asks for, and what it holds of devices, as the API answers it."""

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

Overused = Annotated[
    int | None, Field(description="What the run used when that was first found to be more than its lease.")
]


class BundleView(TypedDict):
    """What each of `count` ranks of a gang asks for."""

    count: int
    gpus: int
    gpu_mb: int | None
    gpu_fraction: float | None
    exclusive: bool
    cpu: float
    memory_mb: int
    custom: dict[str, float]
    kinds: list[str]
    nodes: dict[str, list[str]]


class DemandView(TypedDict):
    gpus: int
    gpu_mb: int | None
    gpu_fraction: float | None
    exclusive: bool
    cpu: float
    memory_mb: int
    custom: dict[str, float]
    kinds: list[str]
    min_power: int
    min_device_mb: int
    nodes: dict[str, list[str]]
    prefer_kinds: list[str]
    prefer_nodes: dict[str, list[str]]
    pool: str
    bundles: Annotated[list[BundleView] | None, Field(description="Of a gang; null for other tasks.")]
    strategy: str | None
    min_ranks: int | None


class ResourcesView(DemandView):
    roles: Annotated[list[str], Field(description="Roles whose most the sizes are, by name.")]


class DeviceShare(TypedDict):
    """What a task holds of one device."""

    uuid: str
    gpu_mb: int
    context_mb: Annotated[int, Field(description="Of `gpu_mb`, the process's own cost beyond its demand.")]
    state: Annotated[str, Field(description="reserved, held, releasing or quarantined.")]
    overused_mb: Overused


class RankView(TypedDict):
    """One rank of a gang."""

    rank: int
    node: str
    state: Annotated[str, Field(description="placed, ready, running, leaving, left, succeeded or ended.")]
    devices: list[DeviceShare]
