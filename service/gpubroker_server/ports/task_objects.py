"""The questions of nodes about objects while tasks run, and the answers. They are neither decisions nor
commits: a node repeats each question until it is answered."""

from msgspec import Struct

from gpubroker_server.core.domain.orders import RunReport
from gpubroker_server.core.domain.units import NodeName


class _AboutObject(RunReport, frozen=True):
    object: str
    """The digest of all bytes of the object."""


class ObjectWanted(_AboutObject, frozen=True):
    """A run opens an object, which the run's tenant must have. The run's node has the bytes before
    `first_byte`, or all of them."""

    first_byte: int
    rank: int = 0


class _Part(_AboutObject, frozen=True):
    size_bytes: int
    """The size of the whole object in bytes."""
    first_byte: int
    data: bytes


class ObjectPart(_Part, frozen=True):
    """A part of a result that is too large for the report of the run's end. The result becomes an object."""

    rank: int = 0


class OutputPart(_Part, frozen=True):
    """A part of the archive of the files that a run has left. The run is gone. If the run left no files,
    `object` and the part are empty."""

    files: int
    message: str
    """Says which files were left out, and why; empty if none was."""
    node: NodeName
    rank: int = 0


ObjectQuestion = ObjectWanted | ObjectPart | OutputPart


class WantedAnswer(Struct, frozen=True):
    node: NodeName
    asked: ObjectWanted
    size_bytes: int
    data: bytes
    """The bytes from `first_byte` on; empty if no bytes follow."""
    failure: str
    """The reason why the run does not get the object; empty if it does."""


class PartAnswer(Struct, frozen=True):
    node: NodeName
    asked: ObjectPart | OutputPart
    stored_bytes: int
    """The number of bytes that are stored; all of them if the tenant has the object by now."""
    failure: str
    """The reason why the result or the outputs cannot become an object; empty if they can."""

    @property
    def is_over(self) -> bool:
        """True if no further part is needed. The outcome of outputs is recorded then, and their node may
        remove the files."""
        return bool(self.failure) or self.stored_bytes >= self.asked.size_bytes


ObjectAnswer = WantedAnswer | PartAnswer
