"""From what a caller wants to run to the body of `POST /tasks`, and from a result's bytes back to a value."""

import base64
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from difflib import get_close_matches
from typing import Any, Final, Literal, TypedDict, cast

import cloudpickle

from gpubroker.errors import WrongArgument

Target = str | Sequence[str] | Callable[..., Any]
"""`"module:function"` names an entrypoint the operator allows; a list of words is a command; a function is
pickled with its arguments and travels along."""


class SubmitOptions(TypedDict, total=False):
    """What `submit` takes by name besides the positional arguments of the task. All may be left out."""

    kwargs: Mapping[str, Any]
    """The task's own keyword arguments."""
    name: str
    """Shown in lists."""
    priority: int | str
    """0 to 100, or the name of a band: critical, interactive, batch (default), background, idle."""
    gpu_mb: int | Literal["learned"]
    """MiB per device; without `gpus`, of one device. `"learned"`: what earlier runs of the same model type
    (else name, else entrypoint) used, and a margin; whole devices as long as too few are known."""
    gpus: int
    """How many devices; without `gpu_mb` and `gpu_fraction`, whole ones."""
    gpu_fraction: float
    """Share of each device's memory, instead of `gpu_mb`."""
    exclusive: bool
    """Share the devices with nobody."""
    cpu: float
    """1 if not given, and 0 for tasks with a GPU."""
    memory_mb: int
    """Host memory, in MiB."""
    custom: Mapping[str, float]
    """Amounts of resources that the operator has named."""
    kinds: Sequence[str]
    """Only GPUs of one of these kinds, such as `["H100", "A100"]`."""
    min_power: int
    """Only kinds of this rank or above; the operator ranks them."""
    min_device_mb: int
    """Only GPUs with so much memory in all, in MiB."""
    nodes: Mapping[str, Sequence[str]]
    """Only nodes with one of the values of each label; the label `node` is the name."""
    prefer_kinds: Sequence[str]
    """Best first; no more than a wish."""
    prefer_nodes: Mapping[str, Sequence[str]]
    """As `nodes`, and no more than a wish."""
    pool: str
    """The operator's pool whose devices and amounts it uses."""
    roles: Mapping[str, Mapping[str, Any]]
    """Instead of sizes: those of each of several roles that take turns, such as
    `{"train": {"gpu_mb": 40960}, "generate": {"gpu_mb": 20480, "cpu": 4}}`. It gets the most of each."""
    bundles: Sequence[Mapping[str, Any]]
    """A gang: what each rank asks for, such as `[{"count": 4, "gpus": 1}, {"cpu": 2}]`; all start together
    or none does. `gpu_mb` of a rank may be `"learned"` too."""
    strategy: str
    """How ranks lie on nodes: `pack` (default) on as few as may be, `spread` on as many, `strict_pack` on
    one, `strict_spread` each on its own."""
    min_ranks: int
    """With so many of its ranks, the first ones, the gang runs as well."""
    placement: str
    """`pack` (default) fills devices that are in use, `spread` takes empty ones first."""
    model_type: str
    """Kind of model, for statistics."""
    stream: str
    """The operator's work stream by whose weight tasks of equal priority and age are ordered."""
    labels: Mapping[str, str]
    """To find it by."""
    env: Mapping[str, str]
    """Environment variables of its process."""
    max_retries: int
    """How often a failed run is tried again; being preempted counts for nothing."""
    timeout_seconds: float
    """Limit for one run, not for waiting in the queue."""
    grace_seconds: float
    """How long the task may take to stop after it was told to."""
    after: Sequence[Any]
    """Tasks, or their ids, that must have ended before it starts. If one does not succeed it fails as well;
    `{"task": id, "on_failure": "ignore"}` runs it all the same."""
    not_before: datetime | str
    """It is not started earlier. An aware datetime, or RFC 3339 with an offset or Z."""
    queue_ttl_seconds: float
    """So long it waits for its first start, from `not_before` on; then it expires."""
    deadline_at: datetime | str
    """If it still waits then it expires; if it runs it is told to stop."""
    deadline_seconds: float
    """`deadline_at`, counted from now."""
    expected_seconds: float
    """How long one run takes. For forecasts; it limits nothing."""
    result_format: str
    """`json` (default) or `cloudpickle` (default for functions)."""
    working_directory: str
    """For commands."""
    idempotency_key: str
    """Submits with the same key and body are one task. Made up by the SDK if not given."""


_RESOURCES = (
    "gpu_mb", "gpus", "gpu_fraction", "exclusive", "cpu", "memory_mb", "custom",
    "kinds", "min_power", "min_device_mb", "nodes", "prefer_kinds", "prefer_nodes", "pool", "roles",
    "bundles", "strategy", "min_ranks",
)  # fmt: skip
_TOP_LEVEL = (
    "name", "priority", "model_type", "stream", "placement", "labels", "env",
    "max_retries", "timeout_seconds", "grace_seconds", "after", "not_before", "queue_ttl_seconds",
    "deadline_at", "deadline_seconds", "expected_seconds", "result_format",
)  # fmt: skip


_WORDS_OF_OTHERS: Final[Mapping[str, str]] = {
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
"""What the command line and other systems call our options."""


USUAL = "_gpubroker_options"
"""The attribute of a function that holds how it is submitted where a submit says nothing else."""


def submission_body(target: Target, args: Sequence[Any], options: SubmitOptions) -> bytes:
    """The JSON of `POST /tasks`. Raises WrongArgument for what no service could accept."""
    options = cast("SubmitOptions", {**getattr(target, USUAL, {}), **options})
    return _body(target, {"run": _run_of(target, args, options)}, options)


def question_body(target: Target | None, args: Sequence[Any], options: SubmitOptions) -> bytes:
    """The JSON of `POST /tasks/simulate`: the same, or without a target that of a bare demand."""
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
        raise WrongArgument(
            f"the arguments of {target!r} do not fit into JSON ({error}); pass plain values, or submit the "
            "function itself instead of its name, so that it travels pickled"
        ) from None


def check_options(options: SubmitOptions) -> None:
    """Raises WrongArgument for one that there is not."""
    for name in options:
        if name not in SubmitOptions.__annotations__:
            raise WrongArgument(_unknown_option(name))


def plain(name: str, value: Any) -> Any:
    """Times and tasks as the service reads them."""
    if name == "after":
        if isinstance(value, str):
            raise WrongArgument("after is a list of tasks; write after=[task]")
        return [getattr(task, "id", task) for task in value]
    if not isinstance(value, datetime):
        return value
    if value.tzinfo is None:
        raise WrongArgument(f"{name} has no time zone; give an aware datetime, such as datetime.now(UTC)")
    return value.isoformat()


def _unknown_option(name: str) -> str:
    near = get_close_matches(_WORDS_OF_OTHERS.get(name, name), SubmitOptions.__annotations__, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    return (
        f"submit() knows no option {name}; {meant}Keyword arguments of the task itself go into "
        f"kwargs={{{name!r}: ...}}"
    )


def _run_of(target: Target, args: Sequence[Any], options: SubmitOptions) -> dict[str, Any]:
    kwargs = options.get("kwargs") or {}
    directory = options.get("working_directory")
    if directory is not None and (callable(target) or isinstance(target, str)):
        raise WrongArgument("working_directory is for commands; functions run where their worker runs")
    if callable(target):
        return {
            "function": base64.b64encode(_pickled(target, args, kwargs)).decode(),
            "python": f"{sys.version_info.major}.{sys.version_info.minor}",
            "cloudpickle": ".".join(cloudpickle.__version__.split(".")[:2]),
        }
    if isinstance(target, str):
        if ":" not in target:
            raise WrongArgument(
                f"{target!r} names no entrypoint; write module:function, or give a command as a list of words"
            )
        return {"entrypoint": target, "args": list(args), "kwargs": dict(kwargs)}
    if not target or not isinstance(cast("object", target), Sequence):
        raise WrongArgument(
            f"{target!r} cannot be run; give module:function, a command as a list of words, or a function"
        )
    if args or kwargs:
        raise WrongArgument("a command takes no arguments beside its words; put them into the list")
    run: dict[str, Any] = {"command": [str(word) for word in target]}
    return run if directory is None else run | {"working_directory": directory}


def _pickled(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    try:
        packed: bytes = cloudpickle.dumps((function, tuple(args), dict(kwargs)))
    except Exception as error:  # what objects refuse it with is their affair
        name = getattr(function, "__qualname__", repr(function))
        raise WrongArgument(
            f"{name} or what it refers to cannot be pickled ({type(error).__name__}: {error}); make locks, "
            "files and connections inside of the function, and pass plain values"
        ) from error
    return packed


def opened(data: bytes) -> Any:
    """Unpickle a result. This runs code that the task chose: open only results of tasks you trust."""
    return cloudpickle.loads(data)
