"""`gpubroker submit`: queue an entrypoint or a command."""

import os
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import typer
from typer.core import TyperCommand

from gpubroker.cli import quantities
from gpubroker.cli.session import Format, Output, broker_of, emit, say, task_id
from gpubroker.cli.tasks import last_task
from gpubroker.cli.tasks.dry_run import show_simulation
from gpubroker.cli.tasks.outcome import wait_and_show
from gpubroker.cli.tasks.submit_file import submit_file

if TYPE_CHECKING:
    from gpubroker.broker import Broker
    from gpubroker.tasks.submission import SubmitOptions
    from gpubroker.tasks.task import Task

_SIZE = {"parser": quantities.size_mb, "metavar": "SIZE"}
_SECONDS = {"parser": quantities.seconds, "metavar": "DURATION"}

Target = Annotated[str | None, typer.Argument(help="module:function; or nothing, and `-- COMMAND ...`.")]
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
        parser=quantities.priority,
        metavar="PRIORITY",
        help="0 to 100, or critical, interactive, batch, background, idle.",
    ),
]
GpuMb = Annotated[
    Any,
    typer.Option(
        "--gpu-memory",
        "--gpu-mb",
        parser=quantities.gpu_size,
        metavar="SIZE",
        help="Memory per GPU: 18GiB, a number of MiB, or learned: what such runs used before.",
    ),
]
Gpus = Annotated[int | None, typer.Option(help="How many GPUs; whole ones if no memory is given.")]
Fraction = Annotated[float | None, typer.Option(help="Share of one GPU, such as 0.5.")]
Exclusive = Annotated[bool, typer.Option("--exclusive", help="Share the GPUs with nobody.")]
Cpu = Annotated[float | None, typer.Option(help="CPUs; if not given, 1, or 0 beside a GPU.")]
Memory = Annotated[Any, typer.Option("--memory", help="Host memory, such as 4GiB.", **_SIZE)]
Custom = Annotated[list[str] | None, typer.Option(metavar="NAME=AMOUNT", help="Custom resource; repeatable.")]
Kinds = Annotated[
    list[str] | None, typer.Option("--kind", help="Only GPUs of this kind, such as H100; repeatable.")
]
PreferKinds = Annotated[
    list[str] | None, typer.Option("--prefer-kind", help="Rather a GPU of this kind; repeatable, best first.")
]
MinPower = Annotated[int | None, typer.Option(help="Only kinds of this rank or above.")]
MinDevice = Annotated[
    Any, typer.Option("--min-device-memory", help="Only GPUs with so much in all.", **_SIZE)
]
Nodes = Annotated[
    list[str] | None,
    typer.Option(
        "--on", metavar="LABEL=VALUE[,VALUE]", help="Only such nodes: node=n1, zone=a,b; repeatable."
    ),
]
PreferNodes = Annotated[
    list[str] | None,
    typer.Option("--prefer-on", metavar="LABEL=VALUE[,VALUE]", help="Rather such nodes; repeatable."),
]
Pool = Annotated[str | None, typer.Option(help="The pool whose devices and amounts it uses.")]
Roles = Annotated[
    list[str] | None,
    typer.Option(
        "--role",
        metavar="NAME:FIELD=VALUE,...",
        help="Instead of sizes, those of a role that takes its turn: train:gpu_mb=40GiB,cpu=4; repeatable.",
    ),
]
Bundles = Annotated[
    list[str] | None,
    typer.Option(
        "--bundle",
        metavar="FIELD=VALUE,...",
        help="Ranks of a gang, such as count=4,gpu_mb=18GiB, gpu_mb=learned or cpu=2; repeatable.",
    ),
]
Strategy = Annotated[
    str | None, typer.Option(help="Of ranks on nodes: pack, spread, strict_pack, strict_spread.")
]
MinRanks = Annotated[int | None, typer.Option(help="Run with so many of the ranks as well.")]
Placement = Annotated[str | None, typer.Option(help="pack or spread.")]
ModelType = Annotated[str | None, typer.Option(help="Kind of model, for defaults and statistics.")]
Stream = Annotated[str | None, typer.Option(help="The operator's work stream that it belongs to.")]
Name = Annotated[str | None, typer.Option("--name", "-n", help="Name shown in lists.")]
Labels = Annotated[
    list[str] | None, typer.Option("--label", "-l", metavar="NAME=VALUE", help="To find it by; repeatable.")
]
Env = Annotated[
    list[str] | None, typer.Option("--env", "-e", metavar="NAME=VALUE", help="For the task; repeatable.")
]
Retries = Annotated[int | None, typer.Option("--retries", help="How often a failed run is tried again.")]
Timeout = Annotated[Any, typer.Option("--timeout", help="Limit for one run, such as 15m.", **_SECONDS)]
Grace = Annotated[Any, typer.Option("--grace", help="Time to stop in after notice.", **_SECONDS)]
After = Annotated[
    list[str] | None,
    typer.Option("--after", metavar="TASK", help="Run after that task, if it succeeds; repeatable."),
]
AfterEnd = Annotated[
    list[str] | None,
    typer.Option("--after-end", metavar="TASK", help="Run after that task, however it ends; repeatable."),
]
NotBefore = Annotated[
    Any,
    typer.Option(
        "--not-before",
        parser=quantities.time_ahead,
        metavar="TIME",
        help="Do not start it earlier: 2026-11-21T22:00Z, or 2h for in two hours.",
    ),
]
QueueTtl = Annotated[
    Any, typer.Option("--queue-ttl", help="Wait so long for the first start, then expire.", **_SECONDS)
]
Deadline = Annotated[
    Any,
    typer.Option(
        "--deadline",
        parser=quantities.time_or_seconds,
        metavar="TIME",
        help="Expire, or stop, when it has not ended by then: a time, or 2h.",
    ),
]
Expected = Annotated[Any, typer.Option("--expected", help="How long a run takes, for forecasts.", **_SECONDS)]
ResultFormat = Annotated[str | None, typer.Option(help="json or cloudpickle.")]
Directory = Annotated[str | None, typer.Option("--working-directory", "-C", help="Where the command runs.")]
Key = Annotated[str | None, typer.Option(help="Submits with the same key are one task.")]
Wait = Annotated[bool, typer.Option("--wait", "-w", help="Wait for the end and print the result.")]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Only say what would become of it: exit code 0 starts (or preempts), 6 refused, 8 waits.",
    ),
]
Batch = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Many tasks: one JSON object per line, as in POST /tasks; `-` is standard input.",
    ),
]
AllOrNothing = Annotated[
    bool, typer.Option("--all-or-nothing", help="With --batch: store none if one is refused.")
]
WaitTimeout = Annotated[Any, typer.Option(help="Wait no longer; the task goes on.", **_SECONDS)]


class CommandAfterDashes(TyperCommand):
    """Keeps everything behind `--` apart: those are the words of the task's own command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.obj = args[at + 1 :]
            args = args[:at]
        return super().parse_args(ctx, args)


def submit(
    context: typer.Context,
    target: Target = None,
    args: Args = None,
    kwargs: Kwargs = None,
    priority: Priority = None,
    gpu_mb: GpuMb = None,
    gpus: Gpus = None,
    gpu_fraction: Fraction = None,
    exclusive: Exclusive = False,
    cpu: Cpu = None,
    memory_mb: Memory = None,
    custom: Custom = None,
    kinds: Kinds = None,
    prefer_kinds: PreferKinds = None,
    min_power: MinPower = None,
    min_device_mb: MinDevice = None,
    nodes: Nodes = None,
    prefer_nodes: PreferNodes = None,
    pool: Pool = None,
    roles: Roles = None,
    bundles: Bundles = None,
    strategy: Strategy = None,
    min_ranks: MinRanks = None,
    placement: Placement = None,
    model_type: ModelType = None,
    stream: Stream = None,
    name: Name = None,
    labels: Labels = None,
    env: Env = None,
    max_retries: Retries = None,
    timeout_seconds: Timeout = None,
    grace_seconds: Grace = None,
    after: After = None,
    after_end: AfterEnd = None,
    not_before: NotBefore = None,
    queue_ttl_seconds: QueueTtl = None,
    deadline: Deadline = None,
    expected_seconds: Expected = None,
    result_format: ResultFormat = None,
    working_directory: Directory = None,
    idempotency_key: Key = None,
    wait: Wait = False,
    wait_timeout: WaitTimeout = None,
    dry_run: DryRun = False,
    batch: Batch = None,
    all_or_nothing: AllOrNothing = False,
    output: Output = Format.TABLE,
) -> None:
    """Queue a task: a function the service allows, or any command behind two dashes.

    \b
    gpubroker submit team.training:fit -i epochs=3 --gpu-memory 18GiB
    gpubroker submit --gpus 1 --priority batch -- python train.py --epochs 3
    gpubroker submit --batch tasks.jsonl
    """
    (_send_task if batch is None else _send_file)(context, locals())


def _send_task(context: typer.Context, given: Mapping[str, Any]) -> None:
    how = _How(given["dry_run"], given["wait"], given["wait_timeout"], given["output"])
    options = _options(given)
    with broker_of(context) as broker:
        options |= _after(broker, given["after"] or [], given["after_end"] or [])
        wanted = _wanted(context, given["target"], bare=how.dry_run)
        _send(broker, wanted, given["args"] or [], options, how)


def _send_file(context: typer.Context, given: Mapping[str, Any]) -> None:
    _check_alone(context, given)
    with broker_of(context) as broker:
        submit_file(
            broker, given["batch"], given["idempotency_key"], given["all_or_nothing"], given["output"]
        )


def _check_alone(context: typer.Context, given: Mapping[str, Any]) -> None:
    """The file says all of each task. Raises BadParameter."""
    with_it = {"context", "batch", "all_or_nothing", "idempotency_key", "output"}
    wrong = [name for name, value in given.items() if name not in with_it and value not in (None, False)]
    if wrong or context.args or context.obj:
        raise typer.BadParameter(
            "beside --batch only --idempotency-key, --all-or-nothing and --output can be given; the rest of "
            "each task stands in the file"
        )


class _How(NamedTuple):
    """What is to be done with the task, and with the answer."""

    dry_run: bool
    wait: bool
    wait_timeout: float | None
    output: Format


def _send(
    broker: "Broker", wanted: str | list[str] | None, args: list[str], options: "SubmitOptions", how: _How
) -> None:
    words = map(quantities.json_or_text, args)
    if how.dry_run or wanted is None:
        show_simulation(broker.simulate(wanted, *words, **options), how.output)
    task = broker.submit(wanted, *words, **options)
    _accepted(broker, task, None if how.wait else how.output)
    if how.wait:
        say(f"accepted {task.id}")
        wait_and_show(broker, task.id, how.wait_timeout, how.output)


def _accepted(broker: "Broker", task: "Task", output: Format | None) -> None:
    """None: what is printed comes later."""
    last_task.remember(broker.connection.url, task.id)
    if output is None:
        return
    say(f"accepted {task.name or 'task'}; how it is doing: gpubroker explain {task.id}")
    if task.sizing:
        say(task.sizing.message)
    emit(output, task, lambda queued: queued.id)


def _after(broker: "Broker", succeeded: list[str], ended: list[str]) -> "SubmitOptions":
    """The tasks to run after, by the words that people use for them."""
    named: list[Any] = [task_id(broker, word) for word in succeeded]
    named += [{"task": task_id(broker, word), "on_failure": "ignore"} for word in ended]
    return {"after": named} if named else {}


def _wanted(context: typer.Context, target: str | None, *, bare: bool = False) -> str | list[str] | None:
    """The entrypoint, or the command; None if there is neither and a `bare` demand will do.

    Most who leave out the dashes, or the colon, do so when they see this for the first time.
    """
    more, command = context.args, context.obj or []
    if bare and target is None and not command:
        return None
    if target is not None and not command and (more or ":" not in target):
        words = [*(["python"] if target.endswith(".py") else []), target, *more]
        wrong = f"{target!r} names no function" if ":" not in target else f"{more[0]!r} is one word too many"
        raise typer.BadParameter(
            f"{wrong}; write module:function, or put a command behind two dashes: "
            f"gpubroker submit -- {shlex.join(words)}"
        )
    if more or (target is None) == (not command):
        raise typer.BadParameter("name one thing to run: module:function, or a command behind two dashes")
    return target or command


def _options(given: Mapping[str, Any]) -> "SubmitOptions":
    """Those of the command's parameters that the SDK takes under the same name, read as it wants them."""
    from gpubroker.tasks.submission import SubmitOptions as Known

    options = {
        name: value
        for name in Known.__annotations__.keys() - {"after"}
        if (value := given.get(name)) is not None and value is not False and value != []
    }
    for name, option in (
        ("kwargs", "--input"),
        ("labels", "--label"),
        ("env", "--env"),
        ("custom", "--custom"),
        ("nodes", "--on"),
        ("prefer_nodes", "--prefer-on"),
    ):
        if name in options:
            options[name] = quantities.pairs(options[name], option)
    if (by := given["deadline"]) is not None:
        options["deadline_seconds" if isinstance(by, float) else "deadline_at"] = by
    if "kwargs" in options:
        options["kwargs"] = {n: quantities.json_or_text(v) for n, v in options["kwargs"].items()}
    for name in {"nodes", "prefer_nodes"} & options.keys():
        options[name] = {label: values.split(",") for label, values in options[name].items()}
    if "roles" in options:
        options["roles"] = dict(map(quantities.role, options["roles"]))
    if "working_directory" in options:
        options["working_directory"] = os.path.abspath(options["working_directory"])
    if "bundles" in options:
        options["bundles"] = [quantities.demand(words, "--bundle") for words in options["bundles"]]
    if "custom" in options:
        options["custom"] = {n: quantities.amount(v) for n, v in options["custom"].items()}
    return cast("SubmitOptions", options)


def add_to(app: typer.Typer) -> None:
    settings = {"allow_extra_args": True}  # to be told what is wrong with them
    app.command(cls=CommandAfterDashes, context_settings=settings, rich_help_panel="Tasks")(submit)
