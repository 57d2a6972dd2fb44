"""The questions of nodes about objects while tasks run, and the answers. None of it is decided or committed:
each question is asked until it is answered."""

from msgspec import Struct

from gpubroker_server.core.domain.orders import RunReport
from gpubroker_server.core.domain.units import NodeName


class _AboutObject(RunReport, frozen=True):
    object: str
    """The digest of all its bytes."""


class ObjectWanted(_AboutObject, frozen=True):
    """The run opens an object, which its tenant must have. Its node has the bytes before `first_byte`, or all
    of them."""

    first_byte: int
    rank: int = 0


class ObjectPart(_AboutObject, frozen=True):
    """A part of a result that is too large for the report of the run's end, and becomes an object."""

    size_bytes: int
    """The size of the whole."""
    first_byte: int
    data: bytes
    rank: int = 0


class OutputPart(_AboutObject, frozen=True):
    """A part of the archive of the files that a run has left, which is gone. Without files `object` is empty,
    and so is the part."""

    size_bytes: int
    first_byte: int
    data: bytes
    files: int
    message: str
    """What was left out, and why; empty if nothing was."""
    node: NodeName
    rank: int = 0


ObjectQuestion = ObjectWanted | ObjectPart | OutputPart


class WantedAnswer(Struct, frozen=True):
    node: NodeName
    asked: ObjectWanted
    size_bytes: int
    data: bytes
    """The bytes from `first_byte` on; empty if nothing follows."""
    failure: str
    """The reason why the run does not get the object; empty if it does."""


class PartAnswer(Struct, frozen=True):
    node: NodeName
    asked: ObjectPart
    stored_bytes: int
    """The number of bytes that are stored; all of them if it is an object of the tenant by now."""
    failure: str
    """The reason why it cannot become an object; empty if it can."""


class OutputAnswer(Struct, frozen=True):
    node: NodeName
    asked: OutputPart
    stored_bytes: int
    is_over: bool
    """True if what becomes of the files is recorded: the node may remove them."""


ObjectAnswer = WantedAnswer | PartAnswer | OutputAnswer
