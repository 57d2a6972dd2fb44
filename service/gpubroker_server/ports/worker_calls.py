"""Port to the workers of sets: calls that go straight to the process of a run."""

from typing import NamedTuple, Protocol

from msgspec import Struct

from gpubroker_server.core.domain.units import Fence, NodeName, Seconds, TaskId


class WorkerRun(NamedTuple):
    """One attempt of a worker. Another attempt refuses its calls."""

    node: NodeName
    task: TaskId
    fence: Fence


class WorkerCall(NamedTuple):
    """`method` is empty for the question whether the object is made: then the answer comes when it is."""

    role: str
    method: str
    form: str
    """The form of the arguments, which no process of the service opens, and of the result: json or
    cloudpickle."""
    arguments: bytes


class Called(Struct, frozen=True):
    """The method returned."""

    result: bytes
    seconds: float


class MethodFailed(Struct, frozen=True):
    """The method raised, or could not be called."""

    kind: str
    message: str
    traceback: str = ""


class NotBegun(Struct, frozen=True):
    """The call has not begun: it may be sent to another worker, unless its time is over."""

    why: str
    is_late: bool = False


class WorkerLost(Struct, frozen=True):
    """The worker ended, or cannot be reached: the call may have begun."""

    why: str


CallAnswer = Called | MethodFailed | NotBegun | WorkerLost


class WorkerCalls(Protocol):
    async def call(self, run: WorkerRun, call: WorkerCall, seconds: Seconds) -> CallAnswer:
        """Call a method. If it does not begin within `seconds`, it never does. If it does, the answer comes
        when it ends."""
