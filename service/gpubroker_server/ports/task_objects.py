"""What nodes ask about objects while tasks run, and the answers. Nothing of it is decided or committed: each
question is asked until it is answered."""

from dataclasses import dataclass

from gpubroker_server.core.domain.units import Fence, Instant, NodeName, TaskId


@dataclass(frozen=True, slots=True)
class ObjectWanted:
    """The run opens an object, which its tenant must have. Its node has the bytes before `first_byte`, or all
    of them."""

    task: TaskId
    fence: Fence
    at: Instant
    object: str
    first_byte: int
    rank: int = 0


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """A part of a result that is too large for the report of the run's end, and becomes an object."""

    task: TaskId
    fence: Fence
    at: Instant
    object: str
    """The digest of the whole."""
    size_bytes: int
    """Of the whole."""
    first_byte: int
    data: bytes
    rank: int = 0


ObjectQuestion = ObjectWanted | ObjectPart


@dataclass(frozen=True, slots=True)
class WantedAnswer:
    node: NodeName
    asked: ObjectWanted
    size_bytes: int
    data: bytes
    """From `first_byte` on; empty if nothing follows."""
    failure: str
    """Why the run does not get it; empty if it does."""


@dataclass(frozen=True, slots=True)
class PartAnswer:
    node: NodeName
    asked: ObjectPart
    stored_bytes: int
    """So much of it is stored; all of it if it is an object of the tenant by now."""
    failure: str
    """Why it cannot become an object; empty if it can."""


ObjectAnswer = WantedAnswer | PartAnswer
