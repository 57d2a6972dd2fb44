"""What the leader asks of the desk that sends inferences to servers of models. Plain values."""

from dataclasses import dataclass

from gpubroker_server.core.domain.units import Fence, TaskId


@dataclass(frozen=True, slots=True)
class InferOrder:
    """Have it answered. What is asked is attached by dispatch on its way."""

    task: TaskId
    fence: Fence
    server: str
    model: str
    rank: int = 0


@dataclass(frozen=True, slots=True)
class DropOrder:
    """Nobody wants the answer any more. What the server has begun it ends for nobody."""

    task: TaskId
    fence: Fence


InferenceOrder = InferOrder | DropOrder
