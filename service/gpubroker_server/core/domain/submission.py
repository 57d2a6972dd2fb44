"""Tasks on their way in, which entrypoints they may name, and the store's answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Seconds, TaskId
from gpubroker_server.core.domain.values import value

Fields = Mapping[str, Any]
"""Plain JSON values: what an event carries and `World.apply` reads."""

EXTERNAL_KIND, MODEL_KIND, INFERENCE_KIND = "external", "model", "inference"
"""`RunSpec.kind` of tasks that no node agent starts."""


@value
class RunSpec:
    """What a task runs: the cold half of a task, as submitted. Large parts are blobs."""

    kind: str
    """entrypoint, command or function, or one of the above."""
    entrypoint: str = ""
    """`module:function`, for kind entrypoint."""
    command: tuple[str, ...] = ()
    arguments: bytes = b""
    """JSON `{"args": [], "kwargs": {}}` for an entrypoint; the cloudpickle of (function, args, kwargs) for a
    function; empty for a command."""
    arguments_digest: str | None = None
    """The blob of `arguments` that are too large for the row."""
    python: str = ""
    """`3.11`: the Python minor that pickled a function."""
    objects: tuple[str, ...] = ()
    """Ids of those that the arguments of a function name, which only its pickle knows otherwise."""
    env: Mapping[str, str] = field(default_factory=dict)
    result_format: str = "json"
    labels: Mapping[str, str] = field(default_factory=dict)
    model_type: str = ""
    working_directory: str = ""
    sizing: Mapping[str, Any] | None = None
    """How its `gpu_mb` was learned at submit (fields of `Size`); None if the client stated it."""


ARRAY_VARIABLE = "GPUBROKER_ARRAY"
"""Of the workers of an array: its id, and the limits of an item."""
WORKER_LABELS = ARRAY_LABEL, WORKER_SET_LABEL = "array", "worker_set"
"""Of the workers of arrays and of sets: the id of what they belong to, which is that of the first."""


@dataclass(frozen=True, slots=True)
class ArrayTerms:
    """What an array does; it never changes. Its workers are the tasks of a batch, and `id` is the first."""

    id: TaskId
    tenant: str
    name: str
    workers: tuple[TaskId, ...]
    numbers: tuple[tuple[int, int], ...]
    """Which of its items are to be done: the first number, and the one after the last, of each range."""
    chunk: int | None
    """How many items are handed out together; None: about 100 ms of work."""
    item_retries: int
    item_timeout_seconds: float | None
    result_format: str
    submitted_at: float
    retry_of: TaskId | None = None
    pickled: bool = False
    """Its workers unpickle the items; otherwise they are JSON."""
    objects: tuple[str, ...] = ()
    """Ids of those that its items name."""

    @property
    def total(self) -> int:
        return sum(behind - first for first, behind in self.numbers)


def array_terms_from(fields: Mapping[str, Any]) -> ArrayTerms:
    """From JSON of its fields."""
    workers = tuple(TaskId(worker) for worker in fields["workers"])
    numbers = tuple((first, behind) for first, behind in fields["numbers"])
    objects = tuple(fields.get("objects", ()))
    return ArrayTerms(**{**fields, "workers": workers, "numbers": numbers, "objects": objects})


WORKER_SET_VARIABLE = "GPUBROKER_WORKER_SET"
"""Of the workers of a set: how each takes calls."""


@value
class Scaling:
    """What the number of workers follows."""

    by: str
    """calls (under way and waiting), cpu (per cent of one core) or signal (a posted number)."""
    target: float
    """How much of it one worker is to have."""
    down_after_seconds: Seconds
    """Fewer workers are wanted only after less was enough for so long."""


@value
class WorkerSet:
    """A set of workers that take calls. Each has a place: an ordinary task, held while it is not wanted."""

    id: TaskId
    """That of its first worker."""
    tenant: str
    name: str
    workers: tuple[TaskId, ...]
    """One per place, all from the beginning."""
    least: int
    most: int
    count: int
    """How many are wanted."""
    max_concurrency: int
    """Calls at once to one worker."""
    created_at: Instant
    scaling: Scaling | None = None
    signal: float | None = None
    """The number that was last posted."""


def worker_set_from(fields: Mapping[str, Any]) -> WorkerSet:
    """From JSON of its fields."""
    scaling = fields["scaling"]
    workers = tuple(TaskId(worker) for worker in fields["workers"])
    return WorkerSet(
        **{**fields, "workers": workers, "scaling": None if scaling is None else Scaling(**scaling)}
    )


SECRET_PREFIX = "secret:"  # noqa: S105  # not a secret: it marks one
"""Before the name of a secret, as the value of a variable in `RunSpec.env`."""


def secrets_named(env: Mapping[str, str]) -> Mapping[str, str]:
    """The variables whose values are secrets of the task's tenant: the secret's name by variable."""
    return {
        variable: text.removeprefix(SECRET_PREFIX)
        for variable, text in env.items()
        if text.startswith(SECRET_PREFIX)
    }


def bytes_of(spec: RunSpec) -> int:
    """What a task keeps for its run. `spec` has its arguments, also those that become an object."""
    pairs = (*spec.env.items(), *spec.labels.items())
    texts = (*spec.command, *spec.objects, *(text for pair in pairs for text in pair))
    return len(spec.arguments) + sum(len(text.encode()) for text in texts)


@dataclass(frozen=True, slots=True)
class Submission:
    """One task on its way in. Its id is made before the commit, so that repeating the commit is harmless."""

    task: Task
    spec: RunSpec
    idempotency_key: str | None = None
    body_hash: str = ""
    like: "Submission | None" = None
    """A submission that differs in task id, run and `queued_bytes` only, so that its encoded fields can be
    reused."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks of an existing task. A gateway inserts it; only the leader carries it out.

    `what` and its fields:

    - of a task: cancel (grace_seconds or none), change (priority, held, times), stack (rank)
    - of an external holder, also: renew (ttl_seconds or none), release (by)
    - of a model, also: want (priority, uses), pin (pinned, by)
    - of operators: attest (leases, by, reason) for a holder; resume (nodes, by, reason) for no task; cordon,
      uncordon (by, reason) and drain (also deadline_seconds or none) of a node, whose name is in `task`
    - of operators for no task: pause and unpause (queue, by, reason); disk, and clean (by, dry_run), of a
      node, whose name is in `task`
    - of a worker set, whose id is in `task`: form (its fields), scale (what is given of least, most and
      count), signal (value)
    - of a work stream, whose name is in `task`: stream (curriculum or none, by, reason), stream_signal
      (progress, progress_at, data_age_seconds, quality: each or none)
    """

    id: str
    task: TaskId
    tenant: str
    what: str
    fields: Fields
    made_at: Instant


@dataclass(frozen=True, slots=True)
class BatchSubmission:
    """One or more tasks that are written together or not at all, in order."""

    submissions: Sequence[Submission]
    idempotency_key: str | None = None
    body_hash: str = ""
    answer: str = ""
    """Kept beside the key for a repeated request; of an array or a worker set its terms. Nothing is kept if
    it is empty."""
    requests: Sequence[Request] = ()
    """To the leader, about these tasks."""

    @property
    def tenant(self) -> str:
        return self.submissions[0].task.tenant

    @property
    def first(self) -> TaskId:
        """Names the batch and carries its key."""
        return self.submissions[0].task.id


class SubmitVerdict(StrEnum):
    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """Same key, same body: `task` is the first task's id; for a batch, of the first batch's first task."""
    KEY_REUSED = "key_reused"


@dataclass(frozen=True, slots=True)
class KnownKey:
    task: TaskId
    body_hash: str


@dataclass(frozen=True, slots=True)
class SubmitOutcome:
    verdict: SubmitVerdict
    task: TaskId


ENTRYPOINT_NOT_ALLOWED = "entrypoint_not_allowed"
"""Failure kind of a task whose entrypoint was withdrawn before its run started."""
SECRET_MISSING = "secret_missing"  # noqa: S105  # not a secret: it says that one is not there
"""Failure kind of a task whose tenant has deleted a secret that it names."""
OBJECT_MISSING = "object_missing"
"""Failure kind of a task that opens an object which its tenant does not have any more."""
ARRAY_IMPORT_FAILED = "array_import_failed"
"""Failure kind of a worker of an array that cannot open its function or its items; `max_retries` of workers
is for crashes of items."""
WITHDRAWN = frozenset({ENTRYPOINT_NOT_ALLOWED, SECRET_MISSING, ARRAY_IMPORT_FAILED, OBJECT_MISSING})
"""Failure kinds of starts that would fail as often as they are tried."""

EntrypointPatterns = tuple[str, ...]


@lru_cache(1024)
def is_entrypoint_allowed(patterns: EntrypointPatterns, entrypoint: str) -> bool:
    return any(_matches(entrypoint, pattern) for pattern in patterns)


def named_patterns(patterns: EntrypointPatterns) -> str:
    """What is allowed, for people."""
    return ", ".join(patterns) or "nothing yet"


def withdrawn_entrypoints(patterns: EntrypointPatterns, waiting: Mapping[str, int]) -> list[tuple[str, int]]:
    """Of the entrypoints of waiting tasks those that are not allowed, and how many tasks name each. The most
    frequent first."""
    found = [(name, count) for name, count in waiting.items() if not is_entrypoint_allowed(patterns, name)]
    return sorted(found, key=lambda each: (-each[1], each[0]))


def _matches(entrypoint: str, pattern: str) -> bool:
    """Left of the colon a wildcard covers whole packages; right of it, one name. Otherwise `jobs:*` would
    allow `jobs:os.system`, which reaches whatever the module imports."""
    module, _, path = entrypoint.partition(":")
    wanted_module, _, wanted_path = pattern.partition(":")
    names, wanted_names = path.split("."), wanted_path.split(".")
    return (
        fnmatchcase(module, wanted_module)
        and len(names) == len(wanted_names)
        and all(map(fnmatchcase, names, wanted_names))
    )
