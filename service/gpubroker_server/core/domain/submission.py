"""Submissions of tasks, requests about tasks, the entrypoints that tasks may name, and the store's
answers."""

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Literal

from gpubroker.wire.arrays import ArrayState
from gpubroker.wire.forecasts import Sizing
from gpubroker.wire.worker_sets import Scaling
from msgspec import Struct, convert, field, json
from msgspec.structs import replace

from gpubroker_server.core.domain.environment import Environment
from gpubroker_server.core.domain.task import RetryOn, Task, TaskState
from gpubroker_server.core.domain.units import Instant, TaskId

Fields = Mapping[str, Any]
"""Plain JSON values, as an event carries them and `World.apply` reads them."""

EXTERNAL_KIND, MODEL_KIND, INFERENCE_KIND = "external", "model", "inference"
"""`RunSpec.kind` of tasks that no node agent starts."""


class ItemTerms(Struct, frozen=True):
    """Terms by which a worker of an array treats each item. The worker's process reads them from its
    environment as JSON."""

    id: TaskId
    """The id of the array."""
    item_retries: int = 0
    item_timeout_seconds: float | None = None
    pickled: bool = False
    """The worker unpickles the items; otherwise they are JSON."""
    retry_on: tuple[RetryOn, ...] = tuple(RetryOn)
    """The causes that use a retry of an item."""


class SeatTerms(Struct, frozen=True):
    """Terms by which a worker of a set takes calls. The worker's process reads them from its environment as
    JSON."""

    id: TaskId
    """The id of the set."""
    max_concurrency: int = 1
    """The most calls that the worker takes at once."""
    start_seconds: float = 3600.0
    """The time within which the worker must have made its objects; otherwise its start has failed."""
    health: Mapping[str, Any] | None = None
    """The method that is called to see whether the worker is well, the interval between two calls, and the
    number of failures after which the worker is ended."""
    roles: Mapping[str, Any] = field(default_factory=dict)
    """Name -> the entrypoint of a further object in the same process, with its arguments."""


class RunSpec(Struct, frozen=True):
    """The specification of a task's run: the cold half of a task, as submitted. Large parts are blobs."""

    kind: str
    """`entrypoint`, `command` or `function`; or EXTERNAL_KIND, MODEL_KIND or INFERENCE_KIND."""
    entrypoint: str = ""
    """`module:function`, for the kind `entrypoint`."""
    command: tuple[str, ...] = ()
    arguments: bytes = b""
    """JSON `{"args": [], "kwargs": {}}` for an entrypoint; the cloudpickle of (function, args, kwargs) for a
    function; empty for a command."""
    arguments_digest: str | None = None
    """The digest of the blob with `arguments` that are too large for the row."""
    python: str = ""
    """The minor version of the Python that pickled a function, such as `3.11`."""
    objects: tuple[str, ...] = ()
    """Ids of the objects that the arguments of a function name. They are listed here because the pickle
    cannot be opened to find them."""
    env: Mapping[str, str] = field(default_factory=dict)
    result_format: str = "json"
    labels: Mapping[str, str] = field(default_factory=dict)
    model_type: str = ""
    working_directory: str = ""
    upload: str = ""
    """Id of the object with the archive of a directory, of which each run gets a copy to work in."""
    outputs: tuple[str, ...] = ()
    """Patterns of the files in its directory that are collected when a run has ended."""
    environment: Environment | None = None
    """The interpreter and the packages of the run; None for those of the service."""
    sizing: Sizing | None = None
    """The way in which `gpu_mb` was learned at submit; None if the client stated it."""
    roles: tuple[str, ...] = ()
    """Names of the roles that take turns in the task's process, sorted."""
    profile: str = ""
    """The profile whose sizes and limits hold for fields that the submit left out."""
    max_concurrency: int | None = None
    """The number of calls that the task's own code takes at once. It is shown and has no other effect."""
    retry_of: TaskId | None = None
    """The ended task that this task repeats."""
    items: ItemTerms | None = None
    """Set for a worker of an array."""
    seat: SeatTerms | None = None
    """Set for a worker of a set."""
    ray: str = ""
    """The Ray cluster of the run: `private` for one of its own, of what it leases, or `shared` for that of
    the service; empty for none."""
    ray_dashboard: bool = False
    """True if the run's own Ray cluster has a dashboard."""

    @property
    def brings_code(self) -> bool:
        """True if the code of the run came with its task, and is not an entrypoint that the operator
        allows."""
        return self.kind != "entrypoint" or bool(self.upload)

    @property
    def is_told_more(self) -> bool:
        """True if the task's process gets environment variables from gpubroker beside those of `env`."""
        return bool(
            self.roles
            or self.profile
            or self.max_concurrency is not None
            or self.retry_of is not None
            or self.items is not None
            or self.seat is not None
            or self.ray
        )


WORKER_LABELS = ARRAY_LABEL, WORKER_SET_LABEL = "array", "worker_set"
"""The labels of workers of arrays and of worker sets. The value is the id of the array or the set, which is
also the id of its first worker."""


class ArrayTerms(Struct, frozen=True):
    """The specification of an array, which never changes. Its workers are the tasks of a batch, and `id` is
    the first of them."""

    id: TaskId
    tenant: str
    name: str
    workers: tuple[TaskId, ...]
    numbers: tuple[tuple[int, int], ...]
    """The items that are to be done, as ranges: each is the first number and the number after the last."""
    chunk: int | None
    """The number of items that are handed out together; None for about 100 ms of work."""
    item_retries: int
    item_timeout_seconds: float | None
    result_format: Literal["json", "cloudpickle"]
    submitted_at: float
    retry_of: TaskId | None = None
    pickled: bool = False
    """True if the workers unpickle the items; otherwise the items are JSON."""
    objects: tuple[str, ...] = ()
    """Ids of the objects that the items name."""
    retry_on: tuple[RetryOn, ...] = tuple(RetryOn)
    """The causes that use a retry of an item."""

    @property
    def total(self) -> int:
        return sum(end - first for first, end in self.numbers)

    def retries_on(self, cause: RetryOn) -> int:
        """Return how often an item is tried again after it ended for this cause."""
        return self.item_retries if cause in self.retry_on else 0


def state_of_array(terms: ArrayTerms, done: int, failed: int, workers: Collection[TaskState]) -> ArrayState:
    """Return the state of an array. `done` is the number of items that have ended and `failed` the number of
    those that failed; `workers` has the states of the workers that have a row. The state may be terminal
    while workers are still about to end."""
    remaining = [state for state in workers if not state.is_terminal]
    if done >= terms.total:
        return ArrayState.FAILED if failed else ArrayState.SUCCEEDED
    if not remaining:
        return ArrayState.CANCELLED if TaskState.CANCELLED in workers else ArrayState.FAILED
    has_begun = done > 0 or len(remaining) < len(workers) or set(remaining) != {TaskState.PENDING}
    return ArrayState.RUNNING if has_begun else ArrayState.PENDING


def array_terms_from(fields: Mapping[str, Any]) -> ArrayTerms:
    """Return the terms that have these JSON fields."""
    return convert(fields, ArrayTerms)


class WorkerSet(Struct, frozen=True):
    """A set of workers that take calls. Each worker has a place in the set: an ordinary task, which is held
    while the worker is not wanted."""

    id: TaskId
    """The id of the set, which is that of its first worker."""
    tenant: str
    name: str
    workers: tuple[TaskId, ...]
    """The tasks of all places. They exist from the beginning, wanted or not."""
    least: int
    most: int
    count: int
    """The number of workers that are wanted."""
    max_concurrency: int
    """The most calls that one worker takes at once."""
    created_at: Instant
    scaling: Scaling | None = None
    signal: float | None = None
    """The number that a client posted last."""


def worker_set_from(fields: Mapping[str, Any]) -> WorkerSet:
    """Return the worker set that has these JSON fields."""
    return convert(fields, WorkerSet)


SECRET_PREFIX = "secret:"  # noqa: S105  # not a secret: it marks one
"""Prefix of a secret's name in the value of a variable in `RunSpec.env`."""


def secrets_named(env: Mapping[str, str]) -> Mapping[str, str]:
    """Return the names of the secrets that the environment refers to, keyed by variable."""
    return {
        variable: text.removeprefix(SECRET_PREFIX)
        for variable, text in env.items()
        if text.startswith(SECRET_PREFIX)
    }


def bytes_of(spec: RunSpec) -> int:
    """Return how many bytes a task keeps for its run. `spec` must still contain the arguments, even if they
    are about to become an object."""
    is_told_more = spec.is_told_more
    if not (spec.env or spec.labels or spec.command or spec.objects or spec.outputs or is_told_more):
        return len(spec.arguments)  # most tasks keep nothing else
    pairs = (*spec.env.items(), *spec.labels.items())
    if is_told_more:
        pairs = (*pairs, *told_variables(spec).items())
    texts = (*spec.command, *spec.objects, *spec.outputs, *(text for pair in pairs for text in pair))
    return len(spec.arguments) + sum(len(text.encode()) for text in texts)


ROLES_VARIABLE = "GPUBROKER_ROLES"
PROFILE_VARIABLE = "GPUBROKER_PROFILE"
CONCURRENCY_VARIABLE = "GPUBROKER_MAX_CONCURRENCY"
RETRY_VARIABLE = "GPUBROKER_RETRY_OF"
ARRAY_VARIABLE = "GPUBROKER_ARRAY"
WORKER_SET_VARIABLE = "GPUBROKER_WORKER_SET"
RAY_VARIABLE = "GPUBROKER_RAY"
RAY_DASHBOARD_VARIABLE = "GPUBROKER_RAY_DASHBOARD"
_TOLD = frozenset(
    {
        ROLES_VARIABLE,
        PROFILE_VARIABLE,
        CONCURRENCY_VARIABLE,
        RETRY_VARIABLE,
        ARRAY_VARIABLE,
        WORKER_SET_VARIABLE,
        RAY_VARIABLE,
        RAY_DASHBOARD_VARIABLE,
    }
)


def told_variables(spec: RunSpec) -> dict[str, str]:
    """Return the variables, beside `env`, by which the process of a task learns about its specification."""
    variables = {
        ROLES_VARIABLE: ",".join(spec.roles),
        PROFILE_VARIABLE: spec.profile,
        CONCURRENCY_VARIABLE: "" if spec.max_concurrency is None else str(spec.max_concurrency),
        RETRY_VARIABLE: spec.retry_of or "",
        ARRAY_VARIABLE: "" if spec.items is None else json.encode(spec.items).decode(),
        WORKER_SET_VARIABLE: "" if spec.seat is None else json.encode(spec.seat).decode(),
        RAY_VARIABLE: spec.ray,
        RAY_DASHBOARD_VARIABLE: "1" if spec.ray_dashboard else "",
    }
    return {name: text for name, text in variables.items() if text}


def with_told(spec: RunSpec) -> RunSpec:
    """Return the specification of a stored row, with the variables of `told_variables` moved from `env` to
    their fields.

    Rows keep these fields in `env` because earlier releases, which may lead while this release is being
    installed, hand a run nothing but its `env`. No client can set variables with these names.
    """
    if spec.sizing is not None and spec.sizing.kind == "":  # rows of earlier releases have "" instead of None
        spec = replace(spec, sizing=replace(spec.sizing, kind=None))
    if _TOLD.isdisjoint(spec.env):
        return spec
    env = {name: text for name, text in spec.env.items() if name not in _TOLD}
    roles, concurrency = spec.env.get(ROLES_VARIABLE), spec.env.get(CONCURRENCY_VARIABLE)
    retry_of = spec.env.get(RETRY_VARIABLE)
    items, seat = spec.env.get(ARRAY_VARIABLE), spec.env.get(WORKER_SET_VARIABLE)
    return replace(
        spec,
        env=env,
        roles=() if roles is None else tuple(roles.split(",")),
        profile=spec.env.get(PROFILE_VARIABLE, ""),
        max_concurrency=None if concurrency is None else int(concurrency),
        retry_of=None if retry_of is None else TaskId(retry_of),
        items=None if items is None else json.decode(items, type=ItemTerms),
        seat=None if seat is None else json.decode(seat, type=SeatTerms),
        ray=spec.env.get(RAY_VARIABLE, ""),
        ray_dashboard=RAY_DASHBOARD_VARIABLE in spec.env,
    )


class AdmittedTask(Struct, frozen=True):
    """An admitted task on its way into the store. Its id is made before the commit, so that repeating the
    commit is harmless."""

    task: Task
    spec: RunSpec
    idempotency_key: str | None = None
    body_hash: str = ""
    like: "AdmittedTask | None" = None
    """A new task that differs only in task id, run and `queued_bytes`, so that its encoded fields can be
    reused."""


class Request(Struct, frozen=True):
    """A client's request to the leader, about an existing task or about something that the leader controls. A
    gateway inserts the request; only the leader carries it out.

    `what` names the action. The actions, with their `fields`, are:

    - on a task: cancel (grace_seconds or none), change (priority, held, times), stack (rank)
    - on an external holder, also: renew (ttl_seconds or none), release (by)
    - on a model, also: want (priority, uses), pin (pinned, by)
    - of operators, on a holder: attest (leases, by, reason)
    - of operators, on a node, whose name is in `task`: cordon and uncordon (by, reason), drain (by, reason,
      deadline_seconds or none), disk and clean (by, dry_run)
    - of operators, on no task: resume (nodes, by, reason), pause and unpause (queue, by, reason)
    - on a worker set, whose id is in `task`: form (the fields of the set), scale (those given of least, most
      and count), signal (value)
    - on a work stream, whose name is in `task`: stream (curriculum or none, by, reason), stream_signal
      (progress, progress_at, data_age_seconds and quality; each or none)
    """

    id: str
    task: TaskId
    tenant: str
    what: str
    fields: Fields
    made_at: Instant


class BatchSubmission(Struct, frozen=True):
    """One or more tasks, in order, that are written together or not at all."""

    submissions: Sequence[AdmittedTask]
    idempotency_key: str | None = None
    body_hash: str = ""
    answer: str = ""
    """The answer to a repeated request, kept beside the key: the terms of an array or a worker set. An empty
    answer is not kept."""
    requests: Sequence[Request] = ()
    """Requests to the leader about these tasks."""

    @property
    def tenant(self) -> str:
        return self.submissions[0].task.tenant

    @property
    def first(self) -> TaskId:
        """The id of the first task. It names the batch and carries its idempotency key."""
        return self.submissions[0].task.id


class StoredState(Struct, frozen=True):
    """The state of a task that others may depend on."""

    tenant: str
    state: TaskState
    failed_by: TaskId | None = None
    array: TaskId | None = None
    """The array, if the task is a worker of one. The id of an array is that of its first worker."""


class SubmitVerdict(StrEnum):
    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """The key and the body are those of an earlier submission. `SubmitOutcome.task` is the id of its first
    task."""
    KEY_REUSED = "key_reused"


class KnownKey(Struct, frozen=True):
    task: TaskId
    body_hash: str


class SubmitOutcome(Struct, frozen=True):
    verdict: SubmitVerdict
    task: TaskId


ENTRYPOINT_NOT_ALLOWED = "entrypoint_not_allowed"
"""Failure kind of a task whose entrypoint was withdrawn before its run started."""
SECRET_MISSING = "secret_missing"  # noqa: S105  # not a secret: it says that one is not there
"""Failure kind of a task whose tenant has deleted a secret that it names."""
OBJECT_MISSING = "object_missing"
"""Failure kind of a task that opens an object which its tenant no longer has."""
ARRAY_IMPORT_FAILED = "array_import_failed"
"""Failure kind of a worker of an array that cannot open its function or its items. No retry follows: the
`max_retries` of workers are for items that crash their worker."""
NO_DIRECTORY = "no_directory"
"""Failure kind of a task whose working directory is missing on its node or cannot be entered by its user."""
RAY_UNUSABLE = "ray_unusable"
"""Failure kind of a task whose program has no Ray, or one that is too old for its cluster."""
WITHDRAWN = frozenset(
    {ENTRYPOINT_NOT_ALLOWED, SECRET_MISSING, ARRAY_IMPORT_FAILED, OBJECT_MISSING, NO_DIRECTORY, RAY_UNUSABLE}
)
"""Failure kinds of starts that would fail again at each retry."""

EntrypointPatterns = tuple[str, ...]


@lru_cache(1024)
def is_entrypoint_allowed(patterns: EntrypointPatterns, entrypoint: str) -> bool:
    return any(_matches(entrypoint, pattern) for pattern in patterns)


def named_patterns(patterns: EntrypointPatterns) -> str:
    """Return the text that names the allowed entrypoints to people."""
    return ", ".join(patterns) or "nothing yet"


def withdrawn_entrypoints(patterns: EntrypointPatterns, waiting: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return (entrypoint, number of waiting tasks) for each entrypoint that is not allowed, the most frequent
    first."""
    withdrawn = [
        (name, count) for name, count in waiting.items() if not is_entrypoint_allowed(patterns, name)
    ]
    return sorted(withdrawn, key=lambda item: (-item[1], item[0]))


def _matches(entrypoint: str, pattern: str) -> bool:
    """Return True if the entrypoint matches the pattern. Left of the colon a wildcard covers whole packages;
    right of it, one name. Otherwise `jobs:*` would allow `jobs:os.system`, which reaches whatever the module
    imports."""
    module, _, path = entrypoint.partition(":")
    wanted_module, _, wanted_path = pattern.partition(":")
    names, wanted_names = path.split("."), wanted_path.split(".")
    return (
        fnmatchcase(module, wanted_module)
        and len(names) == len(wanted_names)
        and all(map(fnmatchcase, names, wanted_names))
    )
