"""The options of a submit, and the bodies of `POST /tasks` and `POST /tasks/batch`."""

import base64
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, Unpack, cast

import cloudpickle

from gpubroker.errors import WrongArgument
from gpubroker.runtime.carrying import (
    call_parts,
    faulty_part,
    function_parts,
    is_not_json,
    is_not_pickled,
)
from gpubroker.runtime.objects import ObjectRef, named_object, pickled_buffers
from gpubroker.tasks.environments import environment_body, project_to_store
from gpubroker.tasks.naming import Ask, ids_after

if TYPE_CHECKING:
    from gpubroker.transport.exchange import Steps

Target = str | Sequence[str] | Callable[..., Any]
"""`"module:function"` names an entrypoint that the operator allows; a list of words is a command; a function
is pickled with its arguments."""


class SubmitOptions(TypedDict, total=False):
    """The keyword arguments of `submit`. All may be left out."""

    kwargs: Mapping[str, Any]
    """The keyword arguments of the task's function."""
    name: str
    """The name that lists show."""
    priority: int | str
    """The priority from 0 to 100, or the name of a band: critical, interactive, batch (default), background,
    idle."""
    gpu_mb: int | Literal["learned"]
    """The MiB per device; without `gpus`, of one device. `"learned"` stands for the memory that earlier runs
    of the same model type (else name, else entrypoint) used, plus a margin. Whole devices are given until
    enough runs are known."""
    gpus: int
    """The number of devices. Whole devices are given if neither `gpu_mb` nor `gpu_fraction` is set."""
    gpu_fraction: float
    """The fraction of each device's memory, instead of `gpu_mb`."""
    exclusive: bool
    """True to share the devices with no other holder."""
    cpu: float
    """The number of CPUs. Default: 1, and 0 for tasks with a GPU."""
    memory_mb: int
    """The host memory, in MiB."""
    custom: Mapping[str, float]
    """The amounts of custom resources that the operator defined."""
    kinds: Sequence[str]
    """The kinds of GPU that the task may use, such as `["H100", "A100"]`."""
    min_power: int
    """The lowest rank of kinds that the task may use; the operator ranks them."""
    min_device_mb: int
    """The least memory in total, in MiB, of a GPU that the task may use."""
    nodes: Mapping[str, Sequence[str]]
    """Labels of nodes with their allowed values: a node must have one of the values of each label. The label
    `node` is the node's name."""
    prefer_kinds: Sequence[str]
    """The preferred kinds, best first."""
    prefer_nodes: Mapping[str, Sequence[str]]
    """The preferred nodes, in the form of `nodes`."""
    pool: str
    """The operator's pool to take devices and custom resources from."""
    roles: Mapping[str, Mapping[str, Any]]
    """The sizes of several roles that take turns in one task, such as `{"train": {"gpu_mb": 40960},
    "generate": {"gpu_mb": 20480, "cpu": 4}}`. They replace the task's own sizes: the task gets the largest
    amount of each resource."""
    bundles: Sequence[Mapping[str, Any]]
    """A gang: the demand of each rank, such as `[{"count": 4, "gpus": 1}, {"cpu": 2}]`. Either all ranks
    start together or none does. `gpu_mb` of a rank may be `"learned"`."""
    strategy: str
    """The way in which ranks are placed: `pack` (default) on as few nodes as possible, `spread` on as many as
    possible, `strict_pack` on one node, `strict_spread` each on its own node."""
    min_ranks: int
    """The number of ranks, counted from the first, with which the gang may start."""
    placement: str
    """`pack` (default) fills devices that are in use; `spread` takes those with the fewest holders, and among
    these the ones with the smallest share of their memory taken."""
    model_type: str
    """The kind of model, for statistics."""
    profile: str
    """The role whose sizes and limits apply to options that are left out; `broker.profiles()` lists the
    roles."""
    max_concurrency: int
    """The number of calls that a worker of a set answers at once. In other tasks, the code finds
    the number in GPUBROKER_MAX_CONCURRENCY."""
    stream: str
    """The operator's work stream; its weight orders tasks of equal priority and age."""
    labels: Mapping[str, str]
    """The labels by which the task can be found."""
    env: Mapping[str, str]
    """The environment variables of the task's process."""
    max_retries: int
    """The number of times that a failed run is retried; a preemption does not count."""
    retry_on: Sequence[str]
    """The causes that use a retry: `failure` (default), `timeout` (the run reached its time limit), or both.
    For an array the option applies to its items, and the default is both."""
    timeout_seconds: float
    """The time limit of one run; time in the queue does not count."""
    grace_seconds: float
    """The time that a run has to stop after the notice."""
    after: Sequence[Any]
    """The tasks that must end first, each as a Task, by its id, a part of the id, or its unique name; in
    `submit_many` also tasks before it, by index (from 0) or by name; a task of the batch goes before an
    older one of this name. If one does not succeed, this task fails; `{"task": id, "on_failure": "ignore"}`
    starts it anyway."""
    held: bool
    """True to keep the task in the queue until `change(task, held=False)` releases it."""
    not_before: datetime | str
    """The earliest start: an aware datetime, or RFC 3339 with an offset or Z."""
    queue_ttl_seconds: float
    """The longest wait for the first start, counted from `not_before`; then the task expires."""
    deadline_at: datetime | str
    """The time at which the task expires if it waits, and is asked to stop if it runs."""
    deadline_seconds: float
    """The time from now to the deadline, instead of `deadline_at`."""
    expected_seconds: float
    """The time that one run takes, for forecasts only."""
    result_format: str
    """The format of the result: `json` (default) or `cloudpickle` (default for functions)."""
    working_directory: str
    """The working directory of a command, on the nodes."""
    upload: str | os.PathLike[str] | ObjectRef
    """A directory that is sent with the task, such as `"."`, or what `put_directory` returned. Each run works
    in its own copy of the directory, which is first on Python's path."""
    environment: str | os.PathLike[str] | Mapping[str, Any]
    """The interpreter and the packages of the runs: the operator's name of an environment; a file
    (requirements.txt, pyproject.toml, a script with metadata) or the directory of a project; or a mapping of
    `python`, `conda`, `requirements`, `project` or `container`."""
    modules: Sequence[Any]
    """Modules, or their names, that are pickled along with a function; other modules are imported on the
    node."""
    ray: bool | str
    """True makes the task, or the whole gang, a Ray cluster of what it leases, and its command the driver.
    `"shared"` lets the command use the service's own Ray, if the operator allows that."""
    ray_dashboard: bool
    """True starts the dashboard of the task's own Ray cluster."""
    outputs: Sequence[str]
    """Patterns of files in the run's directory that are collected at its end, such as `["runs/**"]`."""
    idempotency_key: str
    """A key: submits with the same key and body make one task. Default: a new key."""


_RESOURCES = (
    "gpu_mb", "gpus", "gpu_fraction", "exclusive", "cpu", "memory_mb", "custom",
    "kinds", "min_power", "min_device_mb", "nodes", "prefer_kinds", "prefer_nodes", "pool", "roles",
    "bundles", "strategy", "min_ranks",
)  # fmt: skip
_OF_THE_RUN = ("kwargs", "working_directory", "modules", "idempotency_key")
"""The options that are not in the body under their own name, or that are sent as a header."""
_TOP_LEVEL = tuple(name for name in SubmitOptions.__annotations__ if name not in (*_RESOURCES, *_OF_THE_RUN))


_OTHER_NAMES: Final[Mapping[str, str]] = {
    "gpu": "gpus",
    "gpu_memory": "gpu_mb",
    "fraction": "gpu_fraction",
    "memory": "memory_mb",
    "timeout": "timeout_seconds",
    "grace": "grace_seconds",
    "retries": "max_retries",
    "ttl": "queue_ttl_seconds",
    "queue_ttl": "queue_ttl_seconds",
    "deadline": "deadline_seconds",
    "start_after": "not_before",
    "depends_on": "after",
    "dependencies": "after",
    "input": "kwargs",
    "inputs": "kwargs",
    "args": "kwargs",
    "directory": "working_directory",
    "cwd": "working_directory",
    "key": "idempotency_key",
}
"""The names that these options have on the command line and in other systems."""


DEFAULTS = "_gpubroker_options"
"""The attribute of a function that holds its default options, set by the decorator `task`."""


def submission_body(target: Target, args: Sequence[Any], options: SubmitOptions) -> bytes:
    """The JSON of `POST /tasks`. Raises WrongArgument for what no service could accept."""
    options = with_defaults(target, options)
    return _body(target, {"run": _run_of(target, args, options)}, options)


def with_defaults(target: Target | None, options: SubmitOptions) -> SubmitOptions:
    """Return the options over those that the decorator of the function states."""
    return cast("SubmitOptions", {**getattr(target, DEFAULTS, {}), **options})


def with_ids_after(ask: Ask, target: Target | None, options: SubmitOptions) -> "Steps[SubmitOptions]":
    """Return the options with ids in place of names and parts of ids in `after`, also if the function's
    decorator states it. Raises Refused."""
    after = with_defaults(target, options).get("after")
    if after is None:
        return options
    return cast("SubmitOptions", {**options, "after": (yield from ids_after(ask, after))})


def simulation_body(target: Target | None, args: Sequence[Any], options: SubmitOptions) -> bytes:
    """Return the JSON of `POST /tasks/simulate`, for a submit or for a demand without a target."""
    return _body(None, {}, options) if target is None else submission_body(target, args, options)


def _body(target: Target | None, body: dict[str, Any], options: SubmitOptions) -> bytes:
    check_options(options)
    if callable(target):
        body["result_format"] = "cloudpickle"
    given: Mapping[str, Any] = options
    body |= {name: plain(name, given[name]) for name in _TOP_LEVEL if given.get(name) is not None}
    resources = {name: given[name] for name in _RESOURCES if given.get(name) is not None}
    if resources:
        body["resources"] = resources
    try:
        return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        run = body.get("run", {})
        parts = (*call_parts(run.get("args", ()), run.get("kwargs", {})), *given.items())
        part = faulty_part(parts, is_not_json) or "an argument"
        raise WrongArgument(
            f"{part} of {target!r} cannot be written as JSON ({error}); pass plain values, or submit the "
            "function itself, which is pickled"
        ) from None


def parted_options(options: Mapping[str, Any], kind: Any) -> tuple[SubmitOptions, dict[str, Any]]:
    """Return two parts of the options: those of a submit, and those that only the type `kind` has."""
    own_names = kind.__annotations__.keys() - SubmitOptions.__annotations__.keys()
    of_kind = {name: value for name, value in options.items() if name in own_names and value is not None}
    rest = {name: value for name, value in options.items() if name not in own_names}
    return cast("SubmitOptions", rest), of_kind


def check_options(options: SubmitOptions) -> None:
    """Check that all options are known. Raises WrongArgument for an unknown one."""
    for name in options:
        if name not in SubmitOptions.__annotations__:
            raise WrongArgument(_unknown_option(name))


def plain(name: str, value: Any) -> Any:
    """Return times, tasks and lists in the form of the HTTP API."""
    if name == "retry_on":
        if isinstance(value, str):
            raise WrongArgument(f"retry_on must be a list; write retry_on=[{value!r}]")
        return list(value)
    if name == "outputs":
        if isinstance(value, str):
            raise WrongArgument(f"outputs must be a list; write outputs=[{value!r}]")
        return list(value)
    if name == "environment":
        return environment_body(value)
    if name == "ray":
        return {True: "private", False: ""}.get(value, value)
    if name == "upload":
        if not isinstance(value, ObjectRef):
            raise WrongArgument("upload must be what put_directory returns in a body that is made in advance")
        return value.id
    if name == "after":
        if isinstance(value, str):
            raise WrongArgument("after must be a list of tasks; write after=[task]")
        return [getattr(task, "id", task) for task in value]
    if not isinstance(value, datetime):
        return value
    if value.tzinfo is None:
        raise WrongArgument(f"{name} has no time zone; use an aware datetime, such as datetime.now(UTC)")
    return value.isoformat()


def _unknown_option(name: str) -> str:
    suggestions = get_close_matches(_OTHER_NAMES.get(name, name), SubmitOptions.__annotations__, n=1)
    hint = f"; did you mean {suggestions[0]}?" if suggestions else "."
    return (
        f"submit() has no option {name}{hint} Pass keyword arguments of the task itself as "
        f"kwargs={{{name!r}: ...}}"
    )


def _run_of(target: Target, args: Sequence[Any], options: SubmitOptions) -> dict[str, Any]:
    kwargs = options.get("kwargs") or {}
    directory = options.get("working_directory")
    if options.get("modules") and not callable(target):
        raise WrongArgument("modules is only for functions, which are pickled")
    if directory is not None and (callable(target) or isinstance(target, str)):
        raise WrongArgument("working_directory is only for commands")
    if callable(target):
        return {
            "function": base64.b64encode(_pickled(target, args, kwargs, options.get("modules"))).decode(),
            "python": f"{sys.version_info.major}.{sys.version_info.minor}",
            "cloudpickle": ".".join(cloudpickle.__version__.split(".")[:2]),
            **objects_named([*args, *kwargs.values()]),
        }
    if isinstance(target, str):
        if ":" not in target:
            raise WrongArgument(
                f"invalid entrypoint {target!r}: write module:function, or pass a command as a list of words"
            )
        named = {name: as_json(value) for name, value in kwargs.items()}
        return {"entrypoint": target, "args": list(map(as_json, args)), "kwargs": named}
    if not target or not isinstance(cast("object", target), Sequence):
        raise WrongArgument(
            f"cannot run {target!r}: pass module:function, a command as a list of words, or a function"
        )
    if args or kwargs:
        raise WrongArgument("a command takes no separate arguments; put them into the list of words")
    run: dict[str, Any] = {"command": [str(word) for word in target]}
    return run if directory is None else run | {"working_directory": directory}


def as_json(argument: Any) -> Any:
    """Return the id of an object in the form of the HTTP API, and any other value unchanged."""
    return {"object": argument.id} if isinstance(argument, ObjectRef) else argument


def objects_named(arguments: Iterable[Any]) -> dict[str, Any]:
    """Return the field of a function that lists the objects which its pickled arguments name; empty if they
    name none."""
    ids = sorted({id for value in arguments if (id := named_object(value)) is not None})
    return {"objects": ids} if ids else {}


def _module(named: Any) -> ModuleType:
    if isinstance(named, ModuleType):
        return named
    try:
        return import_module(named)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise WrongArgument(f"modules names {named!r}, which is no module here: {error}") from None


@contextmanager
def _carrying(modules: Sequence[Any]) -> Iterator[None]:
    """Pickle these modules, and the modules of packages among them, by value. Raises WrongArgument."""
    if isinstance(modules, str):
        raise WrongArgument(f"modules must be a list; write modules=[{modules!r}]")
    found = list(map(_module, modules))
    known = cloudpickle.list_registry_pickle_by_value()
    new = [module for module in found if module.__name__ not in known]
    for module in new:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in new:
            cloudpickle.unregister_pickle_by_value(module)


def _pickled(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    modules: Sequence[Any] | None = None,
) -> bytes:
    with _carrying(modules or ()):
        return _packed(function, args, kwargs)


def _packed(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    try:
        packed: bytes = cloudpickle.dumps((function, tuple(args), dict(kwargs)))
    except Exception as error:  # objects may raise anything when they are pickled
        name = getattr(function, "__qualname__", repr(function))
        part = faulty_part((*call_parts(args, kwargs), *function_parts(function)), is_not_pickled)
        what = f"{name} or an object that it refers to" if part is None else f"{part} of {name}"
        raise WrongArgument(
            f"cannot pickle {what} ({type(error).__name__}: {error}); create locks, files and connections "
            "inside the function, and pass plain values"
        ) from error
    return packed


def pickled_function(function: Callable[..., Any], modules: Sequence[Any] | None = None) -> bytes:
    """Return the bytes of an object from which each run gets a copy of the function, and of what it refers
    to, that it may change. The function has been pickled before, with its arguments."""
    with _carrying(modules or ()):
        return b"".join(pickled_buffers(function, beside=False))


MOST_BODY_BYTES = 8 * 2**20
"""The largest body that a service takes, if its operator has not set `limits.body_bytes`."""
MOST_TASKS_TOGETHER = 10_000
_TASKS_PER_PART = 1000
_BYTES_PER_PART = 8 * 2**20


Given = tuple[Target, Sequence[Any], SubmitOptions]
"""The target, the arguments and the options of a submission."""
_UNKNOWN = b""
"""The body of a submission whose directory is not uploaded yet."""


def is_to_upload(options: SubmitOptions, target: Any = None) -> bool:
    """True if these options, or those of a task function, name a directory, or the project of an
    environment, that is not stored as an object yet."""
    defaults = getattr(target, DEFAULTS, {})
    given = options.get("upload", defaults.get("upload"))
    if given is not None and not isinstance(given, ObjectRef):
        return True
    return project_to_store(options.get("environment", defaults.get("environment"))) is not None


class Submission:
    """The arguments of one `submit`, for `submit_many`."""

    def __init__(self, target: Target, *args: Any, **options: Unpack[SubmitOptions]) -> None:
        """Encode the arguments. Raises WrongArgument for arguments that no service could accept."""
        if "idempotency_key" in options:
            raise WrongArgument("a Submission has no key of its own; pass one key to submit_many")
        self.body = _UNKNOWN if is_to_upload(options, target) else submission_body(target, args, options)
        options = with_defaults(target, options)
        self.name = options.get("name")
        self.after = options.get("after")
        self.given: Given | None = None
        """The target, arguments and options of a submission whose body is too long or names a directory;
        otherwise None."""
        if self.body is _UNKNOWN or len(self.body) > MOST_BODY_BYTES:
            self.given = target, args, options


AnySubmission = Submission | Mapping[str, Any]
"""A `Submission`, or a mapping that is the body of `POST /tasks`."""


def body_of(task: AnySubmission, after: Sequence[Any] | None = None) -> bytes:
    """The JSON of one task; of a Submission with these ids in place of what it runs after."""
    if isinstance(task, Submission):
        if after is None:
            return task.body
        body = {**json.loads(task.body), "after": plain("after", after)}
        return json.dumps(body, separators=(",", ":")).encode()
    try:
        return json.dumps(task, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise WrongArgument(
            f"a task cannot be written as JSON ({error}); pass plain values, or a Submission"
        ) from None


def batches(bodies: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Divide the bodies into parts that each fit into one request."""
    part: list[bytes] = []
    size_bytes = 0
    for body in bodies:
        if part and (len(part) == _TASKS_PER_PART or size_bytes + len(body) > _BYTES_PER_PART):
            yield part
            part, size_bytes = [], 0
        part.append(body)
        size_bytes += len(body) + 1
    if part:
        yield part


def parts_of(bodies: Sequence[bytes], *, together: bool) -> list[list[bytes]]:
    """Divide the tasks into parts for one request each; into a single part if some tasks run after others in
    it. Raises WrongArgument."""
    refer = not together and any(b'"after"' in body and _refers_to_batch(body) for body in bodies)
    if (together or refer) and len(bodies) > MOST_TASKS_TOGETHER:
        reason = (
            "tasks that run after others by index or name are sent" if refer else "all_or_nothing sends them"
        )
        raise WrongArgument(
            f"{reason} in one request, of at most {MOST_TASKS_TOGETHER} tasks, not {len(bodies)}"
        )
    return [list(bodies)] if bodies and (together or refer) else list(batches(bodies))


def _refers_to_batch(body: bytes) -> bool:
    named = json.loads(body).get("after") or ()
    wanted = [item.get("task") if isinstance(item, dict) else item for item in named]
    return any(not str(task).startswith("task_") for task in wanted)


def batch_body(part: Sequence[bytes], all_or_nothing: bool) -> bytes:
    """Return the JSON of `POST /tasks/batch`."""
    together = b',"all_or_nothing":true' if all_or_nothing else b""
    return b'{"tasks":[' + b",".join(part) + b"]" + together + b"}"
