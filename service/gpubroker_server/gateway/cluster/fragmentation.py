"""Fragmentation: what of the free memory the usual demands cannot use."""

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.planning.fragmentation import (
    Fragmentation,
    Scattered,
    Sum,
    fragmentation,
    scattered,
)
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import Clock


class KindPiecesView(TypedDict):
    kind: str
    free_mb: int
    stranded_mb: int
    share: float | None


class ScatteredView(TypedDict):
    """What most waiting GPU tasks ask for is free in total, but on no GPU in one piece."""

    gpus: int
    gpu_mb: Annotated[int, Field(description="Needed on each, with the cost of a process.")]
    waiting: Annotated[int, Field(description="How many tasks ask for exactly this.")]
    free_mb: Annotated[int, Field(description="On all GPUs that could host it.")]
    largest_mb: Annotated[int, Field(description="The largest piece of that.")]


class FragmentationView(TypedDict):
    """Of the GPUs that take tasks now: what is free, and what of that the usual demands cannot use."""

    free_mb: int
    stranded_mb: Annotated[int, Field(description="Each usual demand counts by its share of recent submits.")]
    share: Annotated[float | None, Field(description="Of what is free, 0 to 1; null if nothing is.")]
    kinds: list[KindPiecesView]
    scattered: ScatteredView | None


class FragmentationCache:
    """Computed again after an event or a second: overviews and metrics repeat the question."""

    def __init__(self, world: World, policy: Policy, clock: Clock) -> None:
        self._world = world
        self._policy = policy
        self._clock = clock
        self._cached: tuple[tuple[int, int], Fragmentation, Scattered | None] | None = None

    def __call__(self) -> tuple[Fragmentation, Scattered | None]:
        now = self._clock.now()
        at = self._world.position, int(now)
        if self._cached is None or self._cached[0] != at:
            state = self._world, self._policy, now
            self._cached = at, fragmentation(*state), scattered(*state)
        return self._cached[1:]


def fragmentation_view(found: Fragmentation, scattered: Scattered | None) -> FragmentationView:
    total = found.total
    return {
        "free_mb": total.free_mb,
        "stranded_mb": total.stranded_mb,
        "share": _rounded(total),
        "kinds": [
            {"kind": kind, "free_mb": of.free_mb, "stranded_mb": of.stranded_mb, "share": _rounded(of)}
            for kind, of in found.kinds.items()
        ],
        "scattered": None if scattered is None else _scattered_view(scattered),
    }


def _rounded(of: Sum) -> float | None:
    return None if of.share is None else round(of.share, 4)


def _scattered_view(scattered: Scattered) -> ScatteredView:
    return {
        "gpus": scattered.demand.gpus,
        "gpu_mb": scattered.need_mb,
        "waiting": scattered.waiting,
        "free_mb": scattered.free_mb,
        "largest_mb": scattered.largest_mb,
    }
