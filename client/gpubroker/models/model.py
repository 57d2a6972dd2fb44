"""Models of servers, and uploaded objects, as the service answers them."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from gpubroker.errors import WrongArgument
from gpubroker.transport.decoding import Answered


@dataclass(frozen=True, slots=True)
class ServedModel(Answered):
    """A model of a server whose memory the service manages."""

    name: str
    server: str = ""
    state: str = ""
    """cold, waiting, loading, resident or draining."""
    task: str | None = None
    """The holder of its memory; `Broker.explain` says why it waits."""
    priority: int | None = None
    pinned: bool = False
    gpu_mb: int | None = None
    node: str | None = None
    load_seconds: float | None = None
    loaded_at: datetime | None = None
    wanted_until_at: datetime | None = None
    reason: str = ""
    """Why its last load failed, in the server's words."""


@dataclass(frozen=True, slots=True)
class MeasuredModel(Answered):
    """How much memory of a GPU a model took, loaded and asked at these batch sizes."""

    name: str
    server: str = ""
    device: str = ""
    """UUID of the GPU."""
    kind: str = ""
    batch_sizes: tuple[int, ...] = ()
    """Empty: its requests have no dimension for rows."""
    measured_mb: int = 0
    """The most that it took, within 2 %."""
    next_mb: int = 0
    """What its next load leases."""
    configured: bool = False
    """`next_mb` is the `gpu_mb` of the service's settings."""


@dataclass(frozen=True, slots=True)
class StoredObject(Answered):
    """An uploaded object. An array can be an input of `infer_later` as it is; for bytes the input says what
    they are: `{"datatype": "UINT8", "shape": [2, 3], "object": stored.id}`."""

    id: str
    size_bytes: int = 0
    created_at: datetime | None = None
    expires_at: datetime | None = None
    """Each use postpones it."""
    datatype: str = ""
    """Of an array, in Triton's words; empty for bytes."""
    shape: tuple[int, ...] = ()

    def as_input(self, name: str) -> dict[str, Any]:
        """Raises WrongArgument for bytes."""
        if not self.datatype:
            raise WrongArgument(
                f"input {name} is an object that was uploaded as bytes; describe it: "
                f'{{"datatype": ..., "shape": [...], "object": "{self.id}"}}'
            )
        return {"datatype": self.datatype, "shape": list(self.shape), "object": self.id}


@dataclass(frozen=True, slots=True)
class ObjectUsage(Answered):
    """Bytes of all objects of the tenant, and the limit."""

    counted_bytes: int = 0
    """Each object counts at least 4 KiB."""
    most_bytes: int = 0
