"""A submission: the request for a task, before defaults are filled in and before it is checked."""

from typing import Protocol

from msgspec import Struct

from gpubroker_server.core.admission.defaults import GpuSize
from gpubroker_server.core.domain.demand import NO_CONSTRAINTS, Demand, PlacementConstraints
from gpubroker_server.core.domain.holders import External, Model
from gpubroker_server.core.domain.submission import RunSpec
from gpubroker_server.core.domain.task import ON_FAILURE, Dependency, RetryOn


class Asked(Struct, frozen=True):
    """Resources of one process, or of each rank of a gang, as a submitter states them. A field that is None
    was left out."""

    gpus: int | None = None
    gpu_mb: GpuSize | None = None
    gpu_fraction: float | None = None
    exclusive: bool = False
    cpu: float | None = None
    memory_mb: int | None = None
    custom: tuple[tuple[str, float], ...] = ()
    where: PlacementConstraints = NO_CONSTRAINTS
    """The constraints on devices and nodes. Those of a gang hold for each rank that does not state its
    own."""
    placement: str = "pack"
    pool: str = ""
    profile: str = ""
    """The profile of a rank of a gang; empty for that of the task."""
    bundles: tuple["Asked", ...] = ()
    """The resources of each rank of a gang; empty for other tasks."""
    strategy: str = "pack"
    min_ranks: int | None = None
    answered_by: str = ""
    """The model that is to answer an inference; empty for other tasks."""

    @property
    def names_devices(self) -> bool:
        """True if the constraints restrict the GPUs, which also means that a GPU is wanted."""
        where = self.where
        return bool(where.kinds or where.min_power or where.min_device_mb)

    @property
    def mentions_gpus(self) -> bool:
        """True if a number or a size of GPUs is stated, so that no default size applies."""
        return self.gpus is not None or self.wants_gpu

    @property
    def wants_gpu(self) -> bool:
        return self.exclusive or self.gpu_mb is not None or self.gpu_fraction is not None


class AskedTimes(Struct, frozen=True):
    """The times at which a task may start and must end, in seconds since 1970 (`_at`, `not_before`) or in
    seconds from the submission on (`_seconds`)."""

    not_before: float | None = None
    queue_ttl_seconds: float | None = None
    deadline_at: float | None = None
    deadline_seconds: float | None = None


NOTHING_ASKED = Asked()


class Submission(Struct, frozen=True):
    """The fields of a submission. A field that is None gets the default of its profile, of its model type, or
    of all tasks."""

    tenant: str
    spec: RunSpec
    """The run specification with the arguments, however large they are. Its kind determines the kind of the
    task's holder."""
    demand: Asked | Demand = NOTHING_ASKED
    """The resources that are asked for. A Demand is that of an earlier task that is repeated: it is taken
    unchanged with its pool, and the limits of the task are taken unchanged too."""
    name: str = ""
    priority: int | None = None
    max_retries: int | None = None
    """The number of times that a task is retried or, for a worker of a set, restarted after failures."""
    retry_on: tuple[RetryOn, ...] = ON_FAILURE
    """The causes that use a retry of a task. Workers of arrays are retried after every cause."""
    timeout_seconds: float | None = None
    grace_seconds: float | None = None
    expected_seconds: float | None = None
    times: AskedTimes | None = None
    after: tuple[Dependency, ...] = ()
    stream: str = ""
    held: bool = False
    cloudpickle: str | None = None
    """The version of cloudpickle that pickled a function, if the submitter states it."""
    holder: External | Model | None = None
    """The holder of the task; None if the holder follows from the demand and the specification."""


class Sender(Protocol):
    """The holder of a token, with the properties that admission needs."""

    @property
    def name(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def max_priority(self) -> int: ...

    def may(self, scope: str) -> bool: ...
