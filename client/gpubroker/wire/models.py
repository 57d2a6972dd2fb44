"""Models of inference servers: where each is, whether it is in memory, and how much of it one takes."""

from typing import Annotated, Literal

from msgspec import Meta

from gpubroker.wire.answered import Answered, Time

ModelState = Literal["resident", "loading", "draining", "waiting", "cold"]
"""The states in the order of a list: models with memory come first."""


class ServedModel(Answered, frozen=True):
    """A model on a server, and what it holds or waits for."""

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
    priority: Annotated[int | None, Meta(description="Higher ones may take its memory; 100 if pinned.")]
    pinned: bool
    gpu_mb: int | None
    node: str | None
    load_seconds: Annotated[float | None, Meta(description="How long its last load took.")]
    loaded_at: Time | None
    wanted_until_at: Annotated[Time | None, Meta(description="Null while it is pinned, or cold.")]
    reason: Annotated[
        str,
        Meta(
            description="Why it cannot be loaded, or did not load; of a step, which ensemble has loaded it; "
            "else empty."
        ),
    ]


class MeasuredModel(Answered, frozen=True):
    """The GPU memory that a model took, loaded and asked at these batch sizes."""

    name: str
    server: str
    device: Annotated[str, Meta(description="UUID of the GPU.")]
    kind: str
    batch_sizes: Annotated[
        tuple[int, ...], Meta(description="Empty: its requests have no dimension for rows.")
    ]
    measured_mb: Annotated[int, Meta(description="The most that it took, within 2 %.")]
    next_mb: Annotated[int, Meta(description="What its next load leases.")]
    configured: Annotated[bool, Meta(description="`next_mb` is the `gpu_mb` of the settings.")]
