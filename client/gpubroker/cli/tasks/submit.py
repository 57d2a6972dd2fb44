"""`gpubroker submit`: queue an entrypoint, a command, or the tasks of a file."""

import inspect
import os
import shlex
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, cast

import typer
from typer.core import TyperCommand

from gpubroker.cli import parsing
from gpubroker.cli.lookup import connect, remember_last, task_id
from gpubroker.cli.printing import Format, Output, emit, eprint
from gpubroker.cli.tables import short_id
from gpubroker.cli.tasks.batch_file import submit_file
from gpubroker.cli.tasks.directory import place_of
from gpubroker.cli.tasks.explain import show_simulation
from gpubroker.cli.tasks.results import follow_and_show, wait_and_show
from gpubroker.tasks.environments import environment_body, project_to_store

if TYPE_CHECKING:
    from gpubroker.broker import Broker
    from gpubroker.tasks.submission import SubmitOptions

_SIZE = {"parser": parsing.size_mb, "metavar": "SIZE"}
_SECONDS = {"parser": parsing.seconds, "metavar": "DURATION"}

Target = Annotated[
    str | None, typer.Argument(metavar="TARGET", help="module:function. Leave it out for -- COMMAND.")
]
Args = Annotated[
    list[str] | None, typer.Option("--arg", "-a", help="Positional argument, JSON or text; repeatable.")
]
Kwargs = Annotated[
    list[str] | None,
    typer.Option("--input", "-i", metavar="NAME=VALUE", help="Keyword argument, JSON or text; repeatable."),
]
Priority = Annotated[
    Any,
    typer.Option(
        "--priority",
        "-p",
        parser=parsing.priority,
        metavar="PRIORITY",
        help="0 to 100, or critical, interactive, batch, background, idle.",
    ),
]
GpuMb = Annotated[
    Any,
    typer.Option(
        "--gpu-memory",
        "--gpu-mb",
        parser=parsing.gpu_size,
        metavar="SIZE",
        help="Memory per GPU: 18GiB, a number of MiB, or learned (from earlier runs).",
    ),
]
Gpus = Annotated[int | None, typer.Option(help="Number of GPUs; whole ones without --gpu-memory.")]
Fraction = Annotated[float | None, typer.Option(help="Fraction of each GPU, such as 0.5.")]
Exclusive = Annotated[bool, typer.Option("--exclusive", help="Share the GPUs with no other task.")]
Cpu = Annotated[float | None, typer.Option(help="Number of CPUs. Default: 1, or 0 with GPUs.")]
Memory = Annotated[Any, typer.Option("--memory", help="Host memory, such as 4GiB.", **_SIZE)]
Custom = Annotated[
    list[str] | None, typer.Option(metavar="NAME=AMOUNT", help="Amount of a custom resource; repeatable.")
]
Kinds = Annotated[
    list[str] | None, typer.Option("--kind", help="Only GPUs of this kind, such as H100; repeatable.")
]
PreferKinds = Annotated[
    list[str] | None, typer.Option("--prefer-kind", help="Prefer GPUs of this kind; repeatable, best first.")
]
MinPower = Annotated[int | None, typer.Option(help="Only kinds of at least this rank.")]
MinDevice = Annotated[
    Any,
    typer.Option("--min-device-memory", help="Only GPUs with at least this much memory.", **_SIZE),
]
Nodes = Annotated[
    list[str] | None,
    typer.Option(
        "--on",
        metavar="LABEL=VALUE[,VALUE]",
        help="Only nodes with this label, such as zone=a,b; repeatable.",
    ),
]
PreferNodes = Annotated[
    list[str] | None,
    typer.Option("--prefer-on", metavar="LABEL=VALUE[,VALUE]", help="Prefer these nodes; repeatable."),
]
Pool = Annotated[str | None, typer.Option(help="Pool to take GPUs and custom resources from.")]
Roles = Annotated[
    list[str] | None,
    typer.Option(
        "--role",
        metavar="NAME:FIELD=VALUE,...",
        help="Sizes of one of several roles that take turns: train:gpu_mb=40GiB; repeatable.",
    ),
]
Bundles = Annotated[
    list[str] | None,
    typer.Option(
        "--bundle",
        metavar="FIELD=VALUE,...",
        help="Ranks of a gang: count=4,gpu_mb=18GiB or cpu=2; repeatable.",
    ),
]
Strategy = Annotated[
    str | None, typer.Option(help="Placement of ranks: pack, spread, strict_pack, strict_spread.")
]
MinRanks = Annotated[int | None, typer.Option(help="Start the gang with at least this many ranks.")]
Placement = Annotated[
    str | None, typer.Option(help="pack: GPUs in use first. spread: GPUs with fewest holders first.")
]
ModelType = Annotated[str | None, typer.Option(help="Kind of model, for defaults and statistics.")]
Profile = Annotated[str | None, typer.Option(help="Role to take sizes and limits from: gpubroker profiles.")]
Concurrency = Annotated[
    int | None,
    typer.Option("--max-concurrency", help="For the task's own code, in GPUBROKER_MAX_CONCURRENCY."),
]
Stream = Annotated[str | None, typer.Option(help="Work stream, as configured by the operator.")]
Name = Annotated[str | None, typer.Option("--name", "-n", help="Name to show in lists.")]
Labels = Annotated[
    list[str] | None,
    typer.Option("--label", "-l", metavar="NAME=VALUE", help="Label of the task; repeatable."),
]
Env = Annotated[
    list[str] | None,
    typer.Option("--env", "-e", metavar="NAME=VALUE", help="Environment variable; repeatable."),
]
Retries = Annotated[int | None, typer.Option("--retries", help="Number of times to retry a failed run.")]
RetryOn = Annotated[
    list[str] | None,
    typer.Option(
        metavar="failure|timeout",
        help="Cause that uses a retry; repeatable. Default: failure, for the items of map both.",
    ),
]
Timeout = Annotated[Any, typer.Option("--timeout", help="Time limit of one run, such as 15m.", **_SECONDS)]
Grace = Annotated[Any, typer.Option("--grace", help="Time to stop after the notice.", **_SECONDS)]
After = Annotated[
    list[str] | None,
    typer.Option("--after", metavar="TASK", help="Start after this task succeeds; repeatable."),
]
AfterEnd = Annotated[
    list[str] | None,
    typer.Option("--after-end", metavar="TASK", help="Start after this task ends, in any way; repeatable."),
]
NotBefore = Annotated[
    Any,
    typer.Option(
        "--not-before",
        parser=parsing.time_ahead,
        metavar="TIME",
        help="Do not start before this time: 2026-11-21T22:00Z, or 2h from now.",
    ),
]
QueueTtl = Annotated[
    Any, typer.Option("--queue-ttl", help="Expire after waiting this long for the first start.", **_SECONDS)
]
Deadline = Annotated[
    Any,
    typer.Option(
        "--deadline",
        parser=parsing.time_or_seconds,
        metavar="TIME",
        help="Expire, or stop, at this time: a time, or 2h from now.",
    ),
]
Expected = Annotated[Any, typer.Option("--expected", help="Duration of a run, for forecasts.", **_SECONDS)]
ResultFormat = Annotated[str | None, typer.Option(help="Format of the result: json or cloudpickle.")]
Directory = Annotated[
    str | None,
    typer.Option(
        "--dir",
        "--working-directory",
        "-C",
        metavar="DIR",
        help="Directory of the nodes that the command runs in. Default: where you are, if this machine is a "
        "node.",
    ),
]
Upload = Annotated[
    str | None,
    typer.Option(
        metavar="[DIR]",
        help="Send a directory with the task, by default where you are; it runs in a copy.",
    ),
]
Outputs = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Files to collect when a run has ended, such as 'runs/**'; repeatable. See gpubroker outputs.",
    ),
]
Environment = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE|DIR",
        help="Interpreter and packages: the operator's name for them, a requirements.txt, a script with "
        "metadata, or a project's directory.",
    ),
]
Python = Annotated[
    str | None,
    typer.Option(
        metavar="PATH|VERSION", help="Interpreter on the nodes, or the version to install packages for."
    ),
]
Conda = Annotated[
    str | None, typer.Option(metavar="NAME|PREFIX", help="Conda environment that exists on the nodes.")
]
Requirements = Annotated[
    list[str] | None,
    typer.Option(metavar="PACKAGE", help="Package that each node installs once, as 'numpy>=2'; repeatable."),
]
Container = Annotated[str | None, typer.Option(metavar="IMAGE", help="Container image to run a command in.")]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="[private|shared]",
        help="Make the task, or the gang, a Ray cluster of what it leases; the command is its driver.",
    ),
]
RayDashboard = Annotated[bool, typer.Option("--ray-dashboard", help="Start the dashboard of --ray.")]
Key = Annotated[str | None, typer.Option(help="Submits with the same key make one task.")]
Hold = Annotated[
    bool, typer.Option("--hold", help="Keep it in the queue until `gpubroker release` releases it.")
]
Wait = Annotated[bool, typer.Option("--wait", "-w", help="Wait until the task ends and print its result.")]
Follow = Annotated[
    bool, typer.Option("--follow", "-f", help="Print what the task prints until it ends, then its result.")
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Show what would happen, and exit with 0 (would start), 6 (refused) or 8 (would wait).",
    ),
]
Batch = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Submit many tasks: one JSON object per line, as in POST /tasks; - is standard input.",
    ),
]
AllOrNothing = Annotated[
    bool, typer.Option("--all-or-nothing", help="Store no task if one is refused, with --batch.")
]
WaitTimeout = Annotated[
    Any, typer.Option(help="Longest time to wait with --wait; the task continues.", **_SECONDS)
]


class UploadingCommand(TyperCommand):
    """A command whose `--upload` and `--ray` may stand without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = [word for number, word in enumerate(args) for word in _with_value(word, args[number + 1 :])]
        return super().parse_args(ctx, args)


class CommandAfterDashes(UploadingCommand):
    """Keeps the words after `--` apart: they are the command to run."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            separator = args.index("--")
            ctx.obj = args[separator + 1 :]
            args = args[:separator]
        return super().parse_args(ctx, args)


def _with_value(word: str, following: list[str]) -> list[str]:
    """Return the words to parse in place of `word`: `--upload` without a directory becomes `--upload=.`, and
    `--ray` without a kind `--ray=private`."""
    if word == "--ray":
        return [word] if following[:1] in (["private"], ["shared"]) else [f"{word}=private"]
    if word != "--upload":
        return [word]
    is_named = bool(following) and not following[0].startswith("-")
    is_function = is_named and ":" in following[0] and not os.path.isdir(following[0])
    return [word] if is_named and not is_function else [f"{word}=."]


class SubmitParameters(NamedTuple):
    """The parameters of `gpubroker submit`, in the order of its help."""

    target: Target = None
    args: Args = None
    kwargs: Kwargs = None
    priority: Priority = None
    gpu_mb: GpuMb = None
    gpus: Gpus = None
    gpu_fraction: Fraction = None
    exclusive: Exclusive = False
    cpu: Cpu = None
    memory_mb: Memory = None
    custom: Custom = None
    kinds: Kinds = None
    prefer_kinds: PreferKinds = None
    min_power: MinPower = None
    min_device_mb: MinDevice = None
    nodes: Nodes = None
    prefer_nodes: PreferNodes = None
    pool: Pool = None
    roles: Roles = None
    bundles: Bundles = None
    strategy: Strategy = None
    min_ranks: MinRanks = None
    placement: Placement = None
    model_type: ModelType = None
    profile: Profile = None
    max_concurrency: Concurrency = None
    stream: Stream = None
    name: Name = None
    labels: Labels = None
    env: Env = None
    max_retries: Retries = None
    retry_on: RetryOn = None
    timeout_seconds: Timeout = None
    grace_seconds: Grace = None
    after: After = None
    after_end: AfterEnd = None
    not_before: NotBefore = None
    queue_ttl_seconds: QueueTtl = None
    deadline: Deadline = None
    expected_seconds: Expected = None
    result_format: ResultFormat = None
    working_directory: Directory = None
    upload: Upload = None
    environment: Environment = None
    python: Python = None
    conda: Conda = None
    requirements: Requirements = None
    container: Container = None
    outputs: Outputs = None
    ray: Ray = None
    ray_dashboard: RayDashboard = False
    idempotency_key: Key = None
    held: Hold = False
    wait: Wait = False
    follow: Follow = False
    wait_timeout: WaitTimeout = None
    dry_run: DryRun = False
    batch: Batch = None
    all_or_nothing: AllOrNothing = False
    output: Output = Format.TABLE


def submit(context: typer.Context, **given: Any) -> None:
    """Queue a task: a function that the service allows, or any command after --.

    \b
    gpubroker submit team.training:fit -i epochs=3 --gpu-memory 18GiB
    gpubroker submit --gpus 1 --priority batch --follow -- python train.py --epochs 3"""
    (_submit_one if given["batch"] is None else _submit_batch)(context, given)


def _signature_of_submit() -> inspect.Signature:
    """Return a signature from which typer reads the parameters. They are declared in a class because there
    are more of them than a function may have lines."""
    context, _given = inspect.signature(submit).parameters.values()
    parameters = [
        inspect.Parameter(
            name, context.kind, default=default, annotation=SubmitParameters.__annotations__[name]
        )
        for name, default in SubmitParameters._field_defaults.items()
    ]
    return inspect.Signature([context, *parameters], return_annotation=None)


setattr(submit, "__signature__", _signature_of_submit())  # noqa: B010


F = TypeVar("F", bound=Callable[..., Any])


def options_of_submit(*, but: str) -> Callable[[F], F]:
    """Give a command with `**given` the options of `submit` that it lacks itself, except those named in
    `but`."""

    def decorate(command: F) -> F:
        *parameters, output, _given = inspect.signature(command, eval_str=True).parameters.values()
        left_out = {parameter.name for parameter in parameters} | {output.name, *but.split()}
        added = [
            parameter
            for parameter in inspect.signature(submit).parameters.values()
            if parameter.name not in left_out
        ]
        setattr(command, "__signature__", inspect.Signature([*parameters, *added, output]))  # noqa: B010
        return command

    return decorate


def _submit_one(context: typer.Context, given: Mapping[str, Any]) -> None:
    options, output = read_options(given), given["output"]
    target = _target(context, given["target"], is_required=not given["dry_run"])
    args = map(parsing.json_or_text, given["args"] or [])
    with connect() as broker:
        options |= dependencies(broker, given)
        options |= place_of(broker, target, options)
        if given["dry_run"] or target is None:
            show_simulation(broker.simulate(target, *args, **options), output)
        task = broker.submit(target, *args, **options)
        remember_last(broker, task.id)
        if given["follow"]:
            eprint(f"accepted {task.id}")
            follow_and_show(broker, task.id, output)
            return
        if given["wait"]:
            eprint(f"accepted {task.id}")
            wait_and_show(broker, task.id, given["wait_timeout"], output)
            return
        shown = short_id(task.id)
        eprint(f"accepted {task.name or shown}; to follow it: gpubroker logs -f {shown}")
        eprint(f"why it waits, or where it runs: gpubroker explain {shown}")
        if task.sizing:
            eprint(task.sizing.message)
        emit(output, task, lambda task: task.id)


def _submit_batch(context: typer.Context, given: Mapping[str, Any]) -> None:
    allowed = {"batch", "all_or_nothing", "idempotency_key", "output"}
    others = [name for name, value in given.items() if name not in allowed and value not in (None, False)]
    if others or context.args or context.obj:
        raise typer.BadParameter(
            "--batch only goes with --idempotency-key, --all-or-nothing and --output; write the rest of each "
            "task into the file"
        )
    with connect() as broker:
        submit_file(
            broker, given["batch"], given["idempotency_key"], given["all_or_nothing"], given["output"]
        )


def dependencies(broker: "Broker", given: Mapping[str, Any]) -> "SubmitOptions":
    """Return the dependencies that --after and --after-end state."""
    tasks: list[Any] = [task_id(broker, word) for word in given["after"] or []]
    tasks += [{"task": task_id(broker, word), "on_failure": "ignore"} for word in given["after_end"] or []]
    return {"after": tasks} if tasks else {}


def named_target(context: typer.Context, target: str | None) -> str | list[str]:
    """Return the entrypoint, or the words of the command."""
    found = _target(context, target, is_required=True)
    assert found is not None
    return found


def _target(context: typer.Context, target: str | None, *, is_required: bool) -> str | list[str] | None:
    """Return the entrypoint, or the words of the command. New users often forget the colon or the dashes, so
    errors show both."""
    extra, command = context.args, context.obj or []
    if not is_required and target is None and not command:
        return None
    if target is not None and not command and (extra or ":" not in target):
        words = [*(["python"] if target.endswith(".py") else []), target, *extra]
        wrong = f"invalid function {target!r}" if ":" not in target else f"unexpected word {extra[0]!r}"
        raise typer.BadParameter(
            f"{wrong}: write module:function, or a command after --: gpubroker submit -- {shlex.join(words)}"
        )
    if extra or (target is None) == (not command):
        raise typer.BadParameter("give one thing to run: module:function, or a command after --")
    return target or command


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "kwargs": lambda words: {n: parsing.json_or_text(v) for n, v in parsing.pairs(words, "--input").items()},
    "labels": lambda words: parsing.pairs(words, "--label"),
    "env": lambda words: parsing.pairs(words, "--env"),
    "custom": lambda words: {n: parsing.amount(v) for n, v in parsing.pairs(words, "--custom").items()},
    "nodes": lambda words: {n: v.split(",") for n, v in parsing.pairs(words, "--on").items()},
    "prefer_nodes": lambda words: {n: v.split(",") for n, v in parsing.pairs(words, "--prefer-on").items()},
    "roles": lambda words: dict(map(parsing.role, words)),
    "bundles": lambda words: [parsing.demand(word, "--bundle") for word in words],
    "retry_on": lambda words: [cause for word in words for cause in word.split(",")],
    "working_directory": os.path.abspath,
}


def _environment_of(given: Mapping[str, Any]) -> Any:
    """Return the environment that the options state; None if they state none. Raises BadParameter."""
    names = ("python", "conda", "requirements", "container")
    fields = {name: value for name in names if (value := given.get(name))}
    environment = given.get("environment")
    if not fields or environment is None:
        return environment or fields or None
    if fields.keys() != {"python"}:
        others = ", ".join(f"--{name}" for name in fields)
        raise typer.BadParameter(f"give --environment or {others}, not both: a run has one environment")
    body = (
        environment_body(environment) if project_to_store(environment) is None else {"project": environment}
    )
    if isinstance(body, str):
        raise typer.BadParameter("an environment of the operator has a Python of its own; leave --python out")
    return {**body, **fields}


def read_options(given: Mapping[str, Any]) -> "SubmitOptions":
    """Return the parameters of the command that the SDK takes under the same name, in the form that the SDK
    takes."""
    from gpubroker.tasks.submission import SubmitOptions as Known

    options = {
        name: _READERS[name](value) if name in _READERS else value
        for name in Known.__annotations__.keys() - {"after"}
        if (value := given.get(name)) is not None and value is not False and value != []
    }
    if (environment := _environment_of(given)) is not None:
        options["environment"] = environment
    if (deadline := given.get("deadline")) is not None:
        options["deadline_seconds" if isinstance(deadline, float) else "deadline_at"] = deadline
    return cast("SubmitOptions", options)
