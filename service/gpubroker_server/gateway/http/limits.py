"""Sizes and durations that requests are held to."""

from dataclasses import dataclass

from gpubroker_server.core.domain.units import Seconds


@dataclass(frozen=True, slots=True)
class RequestLimits:
    body_bytes: int = 8 * 1024 * 1024
    batch_body_bytes: int = 16 * 1024 * 1024
    object_bytes: int = 16 * 1024 * 1024
    """The largest object that may be uploaded, and the most that all objects of one inference may have."""
    tenant_object_bytes: int = 4 * 1024**3
    tenant_objects: int = 10_000
    """Both limits are for all objects of a tenant."""
    object_seconds: Seconds = Seconds(86400.0)
    """An object is kept this long after its last use."""
    inline_bytes: int = 64 * 1024
    """Arguments up to this size stay in the task's row; larger ones become objects."""
    stale_seconds: Seconds = Seconds(30.0)
    """Overviews older than this are refused."""
    wait_seconds: Seconds = Seconds(60.0)
    """No answer is held back longer than this."""
    settle_seconds: Seconds = Seconds(1.0)
    """How long the answer to a cancel or a change waits for the leader to carry it out."""
    page_items: int = 500
    """The most items on a page."""
