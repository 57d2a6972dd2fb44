"""Models of inference servers: where each is, whether it is in memory, and how much memory it takes."""

from typing import Annotated, Literal

from msgspec import Meta

from gpubroker.wire.answered import Answered, Time

ModelState = Literal["resident", "loading", "draining", "waiting", "cold"]
"""The states in the order of a list, in which models with memory come first."""


class ServedModel(Answered, frozen=True):
    """A model on a server, with what it holds or waits for."""

    name: str
    server: str
    state: Annotated[
        ModelState,
        Meta(
            description="cold: not in memory, and no request needs it; waiting: for room; loading; resident: "
            "it answers requests; draining: it answers the requests that it has, and is then unloaded."
        ),
    ]
    task: Annotated[
        str | None,
        Meta(
            description="The task that holds its memory; `/tasks/{id}/explain` says why it waits. Null for a "
            "cold model, and on a server outside the ledger."
        ),
    ]
    priority: Annotated[
        int | None, Meta(description="The priority of its memory: higher ones may take it; 100 if pinned.")
    ]
    pinned: bool
    gpu_mb: int | None
    node: str | None
    load_seconds: Annotated[float | None, Meta(description="The time that its last load took.")]
    loaded_at: Time | None
    wanted_until_at: Annotated[Time | None, Meta(description="Null while it is pinned, or cold.")]
    reason: Annotated[
        str,
        Meta(
            description="The reason why it cannot be loaded, or did not load; for a step, the ensemble that "
            "has loaded it; else empty."
        ),
    ]


class MeasuredModel(Answered, frozen=True):
    """The GPU memory that a model took, loaded and asked at these batch sizes."""

    name: str
    server: str
    device: Annotated[str, Meta(description="UUID of the GPU.")]
    kind: str
    batch_sizes: Annotated[
        tuple[int, ...],
        Meta(description="The measured batch sizes; empty if its requests have no dimension for rows."),
    ]
    measured_mb: Annotated[int, Meta(description="The most memory that it took, within 2 %.")]
    next_mb: Annotated[int, Meta(description="The memory that its next load leases.")]
    configured: Annotated[bool, Meta(description="True if `next_mb` is the `gpu_mb` of the settings.")]
