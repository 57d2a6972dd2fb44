"""`gpubroker workers create`, `list`, `show`, `scale`, `signal`, `call` and `end`: worker sets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import RenderableType

from gpubroker.cli import parsing
from gpubroker.cli.lookup import connect
from gpubroker.cli.printing import Format, Output, emit, emit_all, eprint, show
from gpubroker.cli.tables import Column, PlainTable, short_id
from gpubroker.cli.tasks.submit import (
    Args,
    Conda,
    Cpu,
    Env,
    Environment,
    GpuMb,
    Gpus,
    Kwargs,
    Labels,
    Memory,
    Name,
    Priority,
    Python,
    Requirements,
    Upload,
    UploadingCommand,
    read_options,
)

if TYPE_CHECKING:
    from gpubroker.wire.worker_sets import WorkerSet

workers = typer.Typer(
    help="Worker sets: stateful workers that are kept running and whose methods are called.",
    no_args_is_help=True,
)

SetWord = Annotated[
    str,
    typer.Argument(
        metavar="SET", help="Id of the set, its unique name, or the end of its id as `list` shows it."
    ),
]
Count = Annotated[int | None, typer.Option("--count", "-j", help="How many workers are wanted.")]
Min = Annotated[int | None, typer.Option("--min", help="At least so many.")]
Max = Annotated[int | None, typer.Option("--max", help="At most so many.")]
_SECONDS = {"parser": parsing.seconds, "metavar": "DURATION"}


@workers.command(cls=UploadingCommand)
def create(
    target: Annotated[str, typer.Argument(metavar="MODULE:CLASS", help="Object that each worker makes.")],
    args: Args = None,
    kwargs: Kwargs = None,
    count: Count = None,
    min_count: Min = None,
    max_count: Max = None,
    scale: Annotated[
        str | None, typer.Option(metavar="BY=TARGET", help="Follow calls, cpu or signal: calls=8.")
    ] = None,
    health: Annotated[str | None, typer.Option(metavar="METHOD", help="Check the health by it.")] = None,
    start_timeout_seconds: Annotated[
        Any, typer.Option("--start-timeout", help="The longest that making the object takes.", **_SECONDS)
    ] = None,
    profile: Annotated[str | None, typer.Option(help="The role of its workers.")] = None,
    max_concurrency: Annotated[
        int | None, typer.Option(help="How many calls a worker answers at once.")
    ] = None,
    priority: Priority = None,
    gpu_mb: GpuMb = None,
    gpus: Gpus = None,
    cpu: Cpu = None,
    memory_mb: Memory = None,
    name: Name = None,
    labels: Labels = None,
    env: Env = None,
    upload: Upload = None,
    environment: Environment = None,
    python: Python = None,
    conda: Conda = None,
    requirements: Requirements = None,
    output: Output = Format.TABLE,
) -> None:
    """Keep workers running that each make one object.

    gpubroker workers create team.solvers:Solver -j 2 --max 8 --scale calls=4 --gpu-memory 20GiB
    """
    given = dict(locals())
    options = dict(read_options(given))
    for option in (
        "count", "min_count", "max_count", "start_timeout_seconds", "profile", "max_concurrency"
    ):  # fmt: skip
        if given[option] is not None:
            options[option] = given[option]
    if scale is not None:
        options["scale"] = _scaling(scale)
    if health is not None:
        options["health"] = {"method": health}
    with connect() as broker:
        seen = broker.create_worker_set(
            target, *map(parsing.json_or_text, args or []), **cast("Any", options)
        )
        emit(output, seen, _drawn)


@workers.command("list")
def list_(
    sort: Annotated[
        str | None, typer.Option(help="created or count; -count: those that want most workers first.")
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """List the worker sets that are not over."""
    with connect() as broker:
        emit_all(output, list(broker.worker_sets(sort=sort)), _table)


@workers.command("show")
def show_(workers: SetWord, output: Output = Format.TABLE) -> None:
    """Show a set and its workers."""
    with connect() as broker:
        emit(output, broker.worker_set(workers), _drawn)


@workers.command()
def scale(
    workers: SetWord,
    count: Annotated[int | None, typer.Argument(help="Number of workers that are wanted.")] = None,
    min_count: Min = None,
    max_count: Max = None,
    output: Output = Format.TABLE,
) -> None:
    """Change how many workers are wanted. Workers that leave finish their calls first."""
    with connect() as broker:
        seen = broker.scale_worker_set(workers, count, min_count=min_count, max_count=max_count)
        emit(output, seen, _drawn)


@workers.command()
def signal(
    workers: SetWord,
    value: Annotated[float, typer.Argument(help="A number, such as the length of a queue of yours.")],
    output: Output = Format.TABLE,
) -> None:
    """Tell a set that scales by `signal` the number that it follows."""
    with connect() as broker:
        emit(output, broker.signal_worker_set(workers, value), _drawn)


@workers.command()
def call(
    workers: SetWord,
    method: Annotated[str, typer.Argument(help="A method of the object.")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments, JSON or text.")] = None,
    role: Annotated[str, typer.Option(help="Which of several roles.")] = "",
    timeout_seconds: Annotated[Any, typer.Option("--timeout", help="Waiting included.", **_SECONDS)] = "60s",
) -> None:
    """Call a method in one worker, and print what it returns as JSON."""
    with connect() as broker:
        values = map(parsing.json_or_text, args or [])
        options: Any = {"role": role, "timeout_seconds": timeout_seconds, "pickled": False}
        show(json.dumps(broker.call_worker(workers, method, *values, **options)))


@workers.command()
def end(workers: SetWord) -> None:
    """End a set: its workers are cancelled."""
    with connect() as broker:
        seen = broker.end_worker_set(workers)
        eprint(f"{seen.id} is over" if seen.state == "over" else f"{seen.id} ends: {_states(seen)}")


def _scaling(text: str) -> dict[str, Any]:
    measure, _, target = text.partition("=")
    try:
        return {"by": measure, "target": float(target)}
    except ValueError:
        raise typer.BadParameter(f"invalid --scale {text!r}: write BY=TARGET, such as calls=8") from None


def _states(seen: WorkerSet) -> str:
    return ", ".join(f"{count} {state}" for state, count in seen.states.items()) or "no worker is left"


def _drawn(seen: WorkerSet) -> str:
    follows = "" if seen.scale is None else f", follows {seen.scale.by} ({seen.scale.target:g} each)"
    lines = [f"{seen.id} {seen.state}: {seen.count} of {seen.min_count}–{seen.max_count} wanted{follows}"]
    for worker in seen.workers:
        failed = f", failed {worker.failures} times" if worker.failures else ""
        place = f" on {worker.node}, attempt {worker.attempt}" if worker.node else ""
        lines.append(f"  {worker.id} {worker.state}{place}{failed}")
    return "\n".join(lines)


def _table(listed: Sequence[WorkerSet]) -> RenderableType:
    columns = (Column("SET"), Column("NAME", share=0.3), Column("WANTED"), Column("WORKERS", share=0.5))
    rows = [
        (short_id(workers.id), workers.name or "-", str(workers.count), _states(workers))
        for workers in listed
    ]
    return PlainTable(columns, rows) if rows else "no worker sets; see: gpubroker workers create --help"
