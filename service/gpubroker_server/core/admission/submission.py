"""A submission: what a submitter asks for, before anything is filled in or checked."""

from typing import Protocol

from msgspec import Struct

from gpubroker_server.core.admission.defaults import GpuSize
from gpubroker_server.core.domain.demand import NO_CONSTRAINTS, Demand, PlacementConstraints
from gpubroker_server.core.domain.holders import External, Model
from gpubroker_server.core.domain.submission import RunSpec
from gpubroker_server.core.domain.task import ON_FAILURE, Dependency, RetryOn


class Asked(Struct, frozen=True):
    """Resources as a submitter states them, of one process or of each rank of a gang. None: left out."""

    gpus: int | None = None
    gpu_mb: GpuSize | None = None
    gpu_fraction: float | None = None
    exclusive: bool = False
    cpu: float | None = None
    memory_mb: int | None = None
    custom: tuple[tuple[str, float], ...] = ()
    where: PlacementConstraints = NO_CONSTRAINTS
    """The constraints of a gang hold for each rank that has none of its own."""
    placement: str = "pack"
    pool: str = ""
    bundles: tuple["Asked", ...] = ()
    """One for each rank of a gang."""
    strategy: str = "pack"
    min_ranks: int | None = None
    answered_by: str = ""
    """The model that is to answer an inference."""

    @property
    def names_devices(self) -> bool:
        """True if it restricts which GPUs will do, and so asks for one."""
        where = self.where
        return bool(where.kinds or where.min_power or where.min_device_mb)

    @property
    def mentions_gpus(self) -> bool:
        """True if it says how many GPUs or how much of them, so that no default size applies."""
        return self.gpus is not None or self.wants_gpu

    @property
    def wants_gpu(self) -> bool:
        return self.exclusive or self.gpu_mb is not None or self.gpu_fraction is not None


class AskedTimes(Struct, frozen=True):
    """The times at which a task may start and must end, in seconds since 1970, or from the submit on."""

    not_before: float | None = None
    queue_ttl_seconds: float | None = None
    deadline_at: float | None = None
    deadline_seconds: float | None = None


NOTHING_ASKED = Asked()


class Submission(Struct, frozen=True):
    """The wishes of a submitter. A field that is None is left to the defaults of its profile, its model type,
    or all tasks."""

    tenant: str
    spec: RunSpec
    """The run with its arguments, however large. Its kind says which holder the task is."""
    demand: Asked | Demand = NOTHING_ASKED
    """A Demand is that of an earlier task, which is done again: it is taken as it is, with its pool, and so
    are the limits."""
    name: str = ""
    priority: int | None = None
    max_retries: int | None = None
    """The number of times that a task is retried or, for a worker of a set, restarted after failures."""
    retry_on: tuple[RetryOn, ...] = ON_FAILURE
    """The causes that use a retry of a task. Workers of arrays come back in any case."""
    timeout_seconds: float | None = None
    grace_seconds: float | None = None
    expected_seconds: float | None = None
    times: AskedTimes | None = None
    after: tuple[Dependency, ...] = ()
    stream: str = ""
    held: bool = False
    cloudpickle: str | None = None
    """The version that pickled a function, if its submitter says so."""
    holder: External | Model | None = None
    """The holder of the task; None if the demand and the specification tell it."""


class Sender(Protocol):
    """The holder of a token, as far as admission asks about it."""

    @property
    def name(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def max_priority(self) -> int: ...

    def may(self, scope: str) -> bool: ...
