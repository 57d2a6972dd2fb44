"""Reasons for which a task waits: stable tokens in a total order, the most structural first."""

from enum import StrEnum

from msgspec import Struct


class Reason(StrEnum):
    """Reasons for which a task waits. The tokens are published: a token is never renamed, and clients must
    expect new tokens. A reserved token is not used yet."""

    HELD = "Held"
    QUEUE_PAUSED = "QueuePaused"
    """An operator has paused the task's tenant or its work stream."""
    MISCONFIGURED = "Misconfigured"  # reserved
    EXCEEDS_CAPACITY = "ExceedsCapacity"
    """The task can never fit: no device, node or limit is large enough."""
    NO_MATCHING_DEVICE = "NoMatchingDevice"
    """The devices that are large enough are not ready, or have another kind."""
    NODE_CORDONED = "NodeCordoned"
    """An operator has closed the nodes that are large enough."""
    GPU_CLOSED = "GpuClosed"
    """GPUs that are large enough need a reset or a repair, or an operator has closed them."""
    DISK_FULL = "DiskFull"
    """A disk of each node that is large enough is too full."""
    ENVIRONMENT_PREPARING = "EnvironmentPreparing"
    """No node that is large enough has the task's environment ready."""
    BACKEND_UNAVAILABLE = "BackendUnavailable"
    """No node answers, no broker leads, or memory use is unknown."""
    NOT_BEFORE = "NotBefore"
    DEPENDENCY_PENDING = "DependencyPending"
    """Tasks that this one runs after have not ended."""
    QUOTA_EXHAUSTED = "QuotaExhausted"
    """The quota of the task's tenant is used up."""
    CONCURRENCY_LIMITED = "ConcurrencyLimited"
    """Run slots, CPU, host memory or a custom resource is used up."""
    BACKGROUND_LIMITED = "BackgroundLimited"
    """Background and idle work may take no more GPU memory: a target says so."""
    FRAGMENTED = "Fragmented"
    """Enough memory is free in total, but not on one device."""
    WAITING_FOR_MEMORY = "WaitingForMemory"
    BEHIND_HIGHER_PRIORITY = "BehindHigherPriority"
    """The task would fit, but the free memory is reserved for others."""
    WAITING_FOR_PREEMPTION = "WaitingForPreemption"
    """Runs are being stopped to make room for the task."""
    MODEL_LOADING = "ModelLoading"
    """The model that is to answer the task is not loaded."""
    PENDING_EVALUATION = "PendingEvaluation"
    """Nothing stands in the task's way; the next cycle considers it."""

    @property
    def tier(self) -> int:
        """The rank of the reason. Of several reasons, the one with the lowest rank is shown."""
        return _TIERS[self]


_TIERS = {
    Reason.HELD: 1,
    Reason.QUEUE_PAUSED: 2,
    Reason.MISCONFIGURED: 3,
    Reason.EXCEEDS_CAPACITY: 4,
    Reason.NO_MATCHING_DEVICE: 5,
    Reason.NODE_CORDONED: 5,
    Reason.GPU_CLOSED: 5,
    Reason.DISK_FULL: 5,
    Reason.ENVIRONMENT_PREPARING: 5,
    Reason.BACKEND_UNAVAILABLE: 6,
    Reason.NOT_BEFORE: 7,
    Reason.DEPENDENCY_PENDING: 7,
    Reason.QUOTA_EXHAUSTED: 8,
    Reason.CONCURRENCY_LIMITED: 9,
    Reason.BACKGROUND_LIMITED: 9,
    Reason.FRAGMENTED: 10,
    Reason.WAITING_FOR_MEMORY: 11,
    Reason.BEHIND_HIGHER_PRIORITY: 12,
    Reason.WAITING_FOR_PREEMPTION: 13,
    Reason.MODEL_LOADING: 14,
    Reason.PENDING_EVALUATION: 15,
}


class Refusal(Struct, frozen=True):
    code: str
    """exceeds-capacity, exceeds-maximum, exceeds-quota, no-matching-device, pool-mismatch,
    unknown-resource or priority-too-low."""
    message: str
    """A text that says what was asked, what exists and what to do."""
    field: str
    """The field of the demand that is at fault: gpu_mb, gpu_fraction, gpus, cpu, memory_mb, kinds, min_power,
    min_device_mb, devices, nodes, custom/NAME."""
