"""Totals: GPU memory and its fragmentation, tasks by state, executor, leader and model servers."""

from typing import Annotated

from msgspec import Meta, Struct

from gpubroker.wire.answered import Answered, AsOf
from gpubroker.wire.forecasts import ForecastsKept
from gpubroker.wire.quarantine import Detection
from gpubroker.wire.queues import Paused


class KindPieces(Answered, frozen=True):
    """The free memory on the GPUs of one kind."""

    kind: str
    free_mb: int
    stranded_mb: int
    share: float | None


class Scattered(Struct, frozen=True):
    """The demand that most waiting GPU tasks have, if its memory is free in total but on no GPU in one
    piece."""

    gpus: int
    gpu_mb: Annotated[int, Meta(description="The memory needed on each, with the cost of a process.")]
    waiting: Annotated[int, Meta(description="The number of tasks that ask for exactly this.")]
    free_mb: Annotated[int, Meta(description="The free memory on all GPUs that could host it.")]
    largest_mb: Annotated[int, Meta(description="The largest piece of that memory.")]


class Fragmentation(Answered, frozen=True):
    """The free memory of the GPUs that take tasks now, and the part of it that the usual demands cannot
    use."""

    free_mb: int
    stranded_mb: Annotated[
        int,
        Meta(
            description="The free memory that usual demands cannot use. Each demand counts by its share of "
            "recent submits."
        ),
    ]
    share: Annotated[
        float | None, Meta(description="The share of the free memory, 0 to 1; null if nothing is free.")
    ]
    kinds: tuple[KindPieces, ...]
    scattered: Scattered | None


class GpuTotals(Answered, frozen=True):
    total_mb: int
    leased_mb: int
    used_mb: int
    free_mb: int
    utilization: Annotated[
        float | None, Meta(description="The used share of the memory, 0 to 1; null before a GPU is measured.")
    ]
    compute_utilization: Annotated[
        float | None,
        Meta(
            description="The share of time in which the GPUs computed: mean over the measured ones, 0 to 1."
        ),
    ]


class TaskCounts(Answered, frozen=True):
    """The counts from `completed` on are of all tasks that ever ended so, also of those that are no longer
    kept. Models are no tasks."""

    pending: int
    admitted: int
    running: int
    stopping: int
    completed: Annotated[int, Meta(description="The same as `succeeded`.")]
    succeeded: int
    failed: int
    cancelled: int
    expired: int


class ModelCounts(Answered, frozen=True):
    """Models in the ledger by state, as `GET /models` names it."""

    waiting: int
    loading: int
    resident: int
    draining: int
    servers: Annotated[int, Meta(description="Servers that hold memory for themselves (`base_mb`).")]


class NodeCounts(Answered, frozen=True):
    total: int
    ready: int
    cordoned: Annotated[int, Meta(description="The number of cordoned nodes, with those that are drained.")]
    draining: Annotated[int, Meta(description="The number of drained nodes on which something is left.")]


class WorkerSetCounts(Answered, frozen=True):
    """The numbers of the worker sets that are not over."""

    sets: int
    wanted: Annotated[int, Meta(description="The number of workers, in all sets together.")]
    running: int


class ExecutorState(Answered, frozen=True):
    state: str
    address: str
    message: str


class Leader(Answered, frozen=True):
    """The leader, in this process or in another one."""

    term: Annotated[int | None, Meta(description="Null if no leader is known.")]
    holder: Annotated[str | None, Meta(description="host:process; null if no leader is known.")]


class ProtocolState(Answered, frozen=True):
    """The state of a model server by one protocol."""

    up: Annotated[
        bool, Meta(description="True if requests are sent to it; false after several failures in a row.")
    ]
    fault: Annotated[str, Meta(description="The fault of the last request or check; empty if it succeeded.")]


class ModelServer(Answered, frozen=True):
    """A model server, as the gateway sees it that answers."""

    name: str
    node: Annotated[str | None, Meta(description="Null if its models are not in the ledger.")]
    node_fault: Annotated[
        str, Meta(description="The reason why its node or GPUs are not there; empty if they are.")
    ]
    http: ProtocolState
    grpc: Annotated[ProtocolState | None, Meta(description="Null where gRPC is not used.")]
    requests_in_flight: Annotated[
        int, Meta(description="The number of requests that were sent to it, and are not answered yet.")
    ]


class Stats(AsOf, frozen=True):
    """Totals of the whole cluster."""

    forecasts: tuple[ForecastsKept, ...]
    gpu: GpuTotals
    fragmentation: Fragmentation
    tasks: TaskCounts
    models: ModelCounts
    nodes: NodeCounts
    worker_sets: WorkerSetCounts
    executor: ExecutorState
    leader: Leader
    detection: Detection
    paused: Annotated[tuple[Paused, ...], Meta(description="Queues that start nothing.")]
    disk_full: Annotated[
        str, Meta(description="The full disk of the process that answers, and the reason; or empty.")
    ]
    model_servers: tuple[ModelServer, ...]
