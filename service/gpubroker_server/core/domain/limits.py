"""Limits on what clients and runs may send, keep and hold open."""

from typing import Annotated

from gpubroker.wire.bounds import Count, PositiveCount
from msgspec import Meta, Struct

from gpubroker_server.core.domain.setting_marks import ELSEWHERE, PositiveSeconds
from gpubroker_server.core.domain.units import Seconds


class ServiceLimits(Struct, frozen=True):
    head_bytes: Annotated[int, Meta(ge=1024)] = 16 * 1024
    head_seconds: PositiveSeconds = Seconds(10.0)
    """The time in which a head must come; without a valid token the whole request."""
    connections: PositiveCount = 2048
    """Open at once, on each port."""
    unauthenticated_connections: PositiveCount = 256
    """The most connections of one address."""
    idle_seconds: Annotated[int, ELSEWHERE] = 75
    """Clients of Triton keep connections for later: Triton never closes one."""
    body_bytes: PositiveCount = 8 * 1024 * 1024
    batch_body_bytes: PositiveCount = 16 * 1024 * 1024
    object_bytes: PositiveCount = 1024**3
    """The largest object that may be uploaded."""
    upload_bytes: PositiveCount = 512 * 1024 * 1024
    """The most bytes of the archive of a directory that travels with a task, packed and unpacked."""
    upload_files: PositiveCount = 20_000
    """The most files and directories in it."""
    output_bytes: PositiveCount = 256 * 1024 * 1024
    """The most bytes of the files that are collected of one attempt."""
    output_files: PositiveCount = 10_000
    copied_object_bytes: PositiveCount = 16 * 1024 * 1024
    """The most that the objects have of which one request takes a copy."""
    tenant_object_bytes: Count = 4 * 1024**3
    tenant_objects: Count = 10_000
    """Most objects of one tenant. This and the limit above count all objects of a tenant."""
    tenant_pending_tasks: Count = 250_000
    """The most tasks of a tenant that wait."""
    tenant_pending_bytes: Count = 4 * 1024**3
    """The most bytes that the waiting tasks of a tenant keep for their runs."""
    tenant_waits: Count = 1_000
    """The most requests of a tenant that wait for a task in one gateway."""
    tenant_requests: Annotated[int, Meta(ge=1)] = 4_096
    """The most requests to models that a tenant has under way at one gateway."""
    inline_bytes: PositiveCount = 64 * 1024
    """Arguments and results up to this size stay in the task's row; larger ones become objects."""
    result_bytes: PositiveCount = 64 * 1024 * 1024
    array_result_bytes: PositiveCount = 4 * 1024**3
    """The most bytes of the results of one array."""
    checkpoint_bytes: PositiveCount = 16 * 1024 * 1024
    log_bytes: Annotated[int, Meta(ge=4096, le=8 * 1024 * 1024)] = 1024 * 1024
    """The bytes that are kept of each stream of a run's output."""
    stale_seconds: PositiveSeconds = Seconds(30.0)
    """Overviews older than this are refused."""
    object_seconds: Annotated[Seconds, ELSEWHERE] = Seconds(86400.0)
    """An object is kept this long after its last use."""
    wait_seconds: Annotated[Seconds, ELSEWHERE] = Seconds(60.0)
    """No answer is held back longer than this."""
    settle_seconds: Annotated[Seconds, ELSEWHERE] = Seconds(1.0)
    """The longest time that the answer to a cancel or a change waits for the leader to carry it out."""
    page_items: Annotated[int, ELSEWHERE] = 500
    """The most items on a page."""
