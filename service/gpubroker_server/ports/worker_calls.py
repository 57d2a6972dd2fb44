"""Port to the workers of worker sets: calls that go straight to the process of a run."""

from typing import NamedTuple, Protocol

from msgspec import Struct

from gpubroker_server.core.domain.units import Fence, NodeName, Seconds, TaskId


class WorkerRun(NamedTuple):
    """One attempt of a worker. Calls for one attempt are refused by every other attempt."""

    node: NodeName
    task: TaskId
    fence: Fence


class WorkerCall(NamedTuple):
    """A call of a method of a worker's object. With an empty `method`, the answer comes once the object is
    made."""

    role: str
    method: str
    form: str
    """The form of the arguments, which no process of the service opens, and of the result: json or
    cloudpickle."""
    arguments: bytes


class Called(Struct, frozen=True):
    """Answer of a method that has returned."""

    result: bytes
    seconds: float


class MethodFailed(Struct, frozen=True):
    """Answer of a method that has raised an exception, or could not be called."""

    kind: str
    message: str
    traceback: str = ""


class NotBegun(Struct, frozen=True):
    """Answer of a call that has not begun. The call may be sent to another worker, unless its time is
    over."""

    why: str
    is_late: bool = False


class WorkerLost(Struct, frozen=True):
    """Answer of a call whose worker has ended, or cannot be reached. The call may have begun."""

    why: str


CallAnswer = Called | MethodFailed | NotBegun | WorkerLost


class WorkerCalls(Protocol):
    async def call(self, run: WorkerRun, call: WorkerCall, seconds: Seconds) -> CallAnswer:
        """Call a method, and return the answer. A call that does not begin within `seconds` never begins. A
        call that has begun is answered when the method ends."""
