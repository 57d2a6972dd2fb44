"""Limits on what clients and runs may send, keep and hold open."""

from typing import Annotated

from gpubroker.wire.bounds import Count, PositiveCount
from msgspec import Meta, Struct

from gpubroker_server.core.domain.setting_marks import ELSEWHERE, PositiveSeconds
from gpubroker_server.core.domain.units import Seconds


class ServiceLimits(Struct, frozen=True):
    head_bytes: Annotated[int, Meta(ge=1024)] = 16 * 1024
    head_seconds: PositiveSeconds = Seconds(10.0)
    """The time in which the head of a request must arrive; without a valid token, the whole request."""
    connections: PositiveCount = 2048
    """The most connections that are open at once on each port."""
    unauthenticated_connections: PositiveCount = 256
    """The most connections without a valid token from one address."""
    idle_seconds: Annotated[int, ELSEWHERE] = 75
    """The time after which an idle connection is closed. It is long because clients of Triton keep
    connections for later: Triton never closes one."""
    body_bytes: PositiveCount = 8 * 1024 * 1024
    batch_body_bytes: PositiveCount = 16 * 1024 * 1024
    object_bytes: PositiveCount = 1024**3
    """The largest object that may be uploaded."""
    upload_bytes: PositiveCount = 512 * 1024 * 1024
    """The most bytes of the archive of a directory that travels with a task, packed and unpacked."""
    upload_files: PositiveCount = 20_000
    """The most files and directories in the archive of a directory that travels with a task."""
    output_bytes: PositiveCount = 256 * 1024 * 1024
    """The most bytes of the files that are collected of one attempt."""
    output_files: PositiveCount = 10_000
    copied_object_bytes: PositiveCount = 16 * 1024 * 1024
    """The most bytes of all objects that one request copies."""
    tenant_object_bytes: Count = 4 * 1024**3
    tenant_objects: Count = 10_000
    """The most objects of one tenant. This limit and `tenant_object_bytes` count all objects of the
    tenant."""
    tenant_pending_tasks: Count = 250_000
    """The most waiting tasks of one tenant."""
    tenant_pending_bytes: Count = 4 * 1024**3
    """The most bytes that the waiting tasks of a tenant keep for their runs."""
    tenant_waits: Count = 1_000
    """The most requests of one tenant that wait for a task in one gateway."""
    event_streams: Count = 1_000
    """The most event streams that are open at one gateway."""
    token_event_streams: Count = 100
    """The most event streams that one token has open at one gateway."""
    tenant_requests: Annotated[int, Meta(ge=1)] = 4_096
    """The most requests to models that a tenant has under way at one gateway."""
    inline_bytes: PositiveCount = 64 * 1024
    """Arguments and results up to this size stay in the task's row; larger ones become objects."""
    result_bytes: PositiveCount = 64 * 1024 * 1024
    array_result_bytes: PositiveCount = 4 * 1024**3
    """The most bytes of the results of one array."""
    checkpoint_bytes: PositiveCount = 16 * 1024 * 1024
    log_bytes: Annotated[int, Meta(ge=4096, le=8 * 1024 * 1024)] = 1024 * 1024
    """The number of bytes that are kept of each stream of a run's output."""
    stale_seconds: PositiveSeconds = Seconds(30.0)
    """The age above which an overview is not given to clients."""
    object_seconds: Annotated[Seconds, ELSEWHERE] = Seconds(86400.0)
    """The time for which an object is kept after its last use."""
    wait_seconds: Annotated[Seconds, ELSEWHERE] = Seconds(60.0)
    """The longest time for which an answer is held back."""
    settle_seconds: Annotated[Seconds, ELSEWHERE] = Seconds(1.0)
    """The longest time that the answer to a cancel or a change waits for the leader to carry it out."""
    page_items: Annotated[int, ELSEWHERE] = 500
    """The most items on a page."""
