"""The facts that admission needs beside the submission, and the answers of admission. They are plain values,
so that admission waits for nothing."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from gpubroker.wire.forecasts import Sizing
from msgspec import Struct

from gpubroker_server.core.admission.submission import Sender
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.reasons import Refusal
from gpubroker_server.core.domain.submission import AdmittedTask, StoredState
from gpubroker_server.core.domain.units import Instant, TaskId

NO_STATES: Mapping[TaskId, StoredState] = {}
NO_OBJECTS: Mapping[str, str] = {}


class FleetLookup(Protocol):
    """Answers questions about the inventory and past runs. Answers are kept from one submission to the
    next."""

    def refusal(self, demand: Demand) -> Refusal | None:
        """Return the refusal of a demand that no node could ever satisfy; None if a node could."""

    def counted_mb(self, demand: Demand) -> int:
        """Return how many MiB the demand counts against a quota."""

    def gpu_share(self, demand: Demand) -> float:
        """Return the largest share of a GPU that each GPU of this demand may take."""

    def python_of(self, environment: str) -> str:
        """Return the minor version of Python that nodes have found in the environment with this key; empty
        if no node has told it."""

    def learned_size(self, demand: Demand, tenant: str, subject: str) -> Sizing:
        """Return the size that earlier runs used on the devices that this demand may use."""


class Facts(Struct, frozen=True):
    """The facts by which a submission is judged."""

    id: TaskId
    """The id of the new task; for an array or a worker set, the id of its first worker."""
    now: Instant
    fleet: FleetLookup
    sender: Sender | None
    """The sender of the submission; None if the service itself submits, which needs no permission."""
    dependencies: Mapping[TaskId, StoredState] = NO_STATES
    """The states of the tasks that the new task runs after, as far as they exist."""
    streams: Collection[str] = ()
    """The names of all work streams. They are needed only if the submission names a stream."""
    secrets: Sequence[str] = ()
    """The names of the tenant's secrets. They are needed only if `env` names a secret."""
    missing_objects: Mapping[str, str] = NO_OBJECTS
    """Pointer -> id of each object that the run names and the tenant does not have."""
    object_seconds: float = 0.0
    """The time for which an object is kept after its last use, for the text of a refusal."""


class Refused(Struct, frozen=True):
    """The refusal of a submission."""

    code: str
    """The code of the refusal's problem, as in docs/errors.md."""
    detail: str = ""
    """The cause in words; empty for `validation-failed`, whose faults say what is wrong."""
    faults: tuple[Refusal, ...] = ()
    """All invalid fields, or the one field that could never be satisfied. `Refusal.field` is a pointer into
    the body by RFC 6901."""
    would_be: AdmittedTask | None = None
    """The task that the submission would have become, if its body is valid."""


INVALID = "validation-failed"


def refused_at(pointer: str, refusal: Refusal, would_be: AdmittedTask | None = None) -> Refused:
    """Return the refusal of a submission for its demand. The field of `refusal` is below `pointer` in the
    body."""
    fault = Refusal(refusal.code, refusal.message, f"{pointer}/{refusal.field}")
    return Refused(refusal.code, refusal.message, (fault,), would_be)
