"""Models of a server, whose memory the service holds; see `gpubroker.tasks.task` for how answers are read."""

from dataclasses import dataclass, field
from datetime import datetime

from gpubroker.transport.decoding import Raw


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    server: str = ""
    state: str = ""
    """cold, waiting, loading, resident or draining."""
    task: str | None = None
    """Holds its memory; `Broker.explain` says why it waits."""
    priority: int | None = None
    pinned: bool = False
    gpu_mb: int | None = None
    node: str | None = None
    load_seconds: float | None = None
    loaded_at: datetime | None = None
    wanted_until_at: datetime | None = None
    reason: str = ""
    """Why its last load failed, in the server's words."""
    raw: Raw = field(default_factory=dict, repr=False)
