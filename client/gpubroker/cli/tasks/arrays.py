"""`gpubroker map` and `array`: one function or command for each line of a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from gpubroker.cli import EXIT_CANCELLED, EXIT_TASK_FAILED, parsing
from gpubroker.cli.lookup import connect, remember_last, task_id
from gpubroker.cli.printing import Format, Output, emit, eprint, show
from gpubroker.cli.tables import counted
from gpubroker.cli.tasks.directory import place_of
from gpubroker.cli.tasks.submit import Target, dependencies, named_target, options_of_submit, read_options
from gpubroker.tasks.array_api import bar_line, progress_bar
from gpubroker.transport.operations import without_none
from gpubroker.wire.arrays import ArrayState

if TYPE_CHECKING:
    from gpubroker.broker import Broker
    from gpubroker.tasks.array_api import ArrayItem
    from gpubroker.wire.arrays import Array

_SECONDS = {"parser": parsing.seconds, "metavar": "DURATION"}

Items = Annotated[
    str,
    typer.Option(
        "--items",
        "-I",
        metavar="FILE",
        help="One item a line; of a function JSON or text, of a command text as it is. - is standard input.",
    ),
]
Parallel = Annotated[
    int | None, typer.Option("--parallel", "-j", help="Number of workers that run at once. Default: 4.")
]
Chunk = Annotated[
    int | None, typer.Option(help="Items handed to a worker together. Default: about 100 ms of work.")
]
ItemTimeout = Annotated[Any, typer.Option("--item-timeout", help="Time limit of one item.", **_SECONDS)]
ItemRetries = Annotated[
    int | None,
    typer.Option(help="Number of times to retry an item that failed or took too long (see --retry-on)."),
]
ArrayWord = Annotated[
    str,
    typer.Argument(
        metavar="ARRAY", help="Id of the array, as `map` prints it, of one of its workers, its name, or last."
    ),
]


@options_of_submit(
    but="bundles strategy min_ranks max_retries wait follow wait_timeout dry_run batch all_or_nothing "
    "ray ray_dashboard"
)
def map_(
    context: typer.Context,
    target: Target = None,
    items: Items = "-",
    max_parallel: Parallel = None,
    chunk: Chunk = None,
    item_timeout_seconds: ItemTimeout = None,
    item_retries: ItemRetries = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Print the id; do not wait.")] = False,
    output: Output = Format.TABLE,
    **given: Any,
) -> None:
    """Run a function, or a command after --, for each line of a file. A function gets the item as its first
    argument; in a command each {} is replaced by it, also inside a word.

    \b
    gpubroker map team.checks:verify --items proofs.jsonl -j 8 --item-retries 2
    find . -name '*.wav' | gpubroker map --cpu 1 -- ffmpeg -i {} -y {}.mp3

    Results go to standard output, in order, one a line; items that failed to standard error. Options that
    submit has too are for each worker.
    """
    of_array = {
        "max_parallel": max_parallel,
        "chunk": chunk,
        "item_timeout_seconds": item_timeout_seconds,
        "item_retries": item_retries,
    }
    with connect() as broker:
        found = named_target(context, target)
        wanted = read_options(given) | dependencies(broker, given)
        options = cast("Any", wanted | place_of(broker, found, wanted)) | without_none(of_array)
        values = list(_items_of(items, parsing.json_or_text if isinstance(found, str) else str))
        array = broker.submit_array(found, values, *map(parsing.json_or_text, given["args"] or []), **options)
        remember_last(broker, array.id)
        if detach:
            eprint("to follow it: gpubroker array " + array.id)
            emit(output, array, lambda array: array.id)
            return
        eprint(f"accepted {array.id}")
        _print_results(broker, array, output)


def array(
    array: ArrayWord,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Wait for it, and print its results.")] = False,
    items: Annotated[bool, typer.Option("--items", help="Print the items that are done.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Show only failed items, with --items.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Do what failed again, as a new array.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel what is left of it.")] = False,
    output: Output = Format.TABLE,
) -> None:
    """Show how far an array is; its results, with --items; do its failed items again, or cancel the rest."""
    if sum((wait, items, cancel)) > 1 or (failed and not items) or (retry and (items or cancel)):
        raise typer.BadParameter("give one of --wait, --items, --cancel and --retry (--retry --wait works)")
    with connect() as broker:
        array = task_id(broker, array, to_change=retry or cancel)
        if items:
            for item in broker.array_items(array, **({"state": "failed"} if failed else {})):
                show(json.dumps(item.raw))
            return
        ask = broker.retry_array if retry else broker.cancel_array if cancel else broker.array
        answer = ask(array)
        if retry:
            remember_last(broker, answer.id)
            eprint(f"accepted {answer.id}: {counted(answer.total, 'item')} again")
        if wait:
            _print_results(broker, answer, output)
            return
        emit(output, answer, _drawn)


def _print_results(broker: Broker, array: Array, output: Format) -> None:
    """Print the results of an array. Exit with 3 if an item failed or was left, and with 4 if the array was
    cancelled."""
    show_bar = progress_bar()
    after: Mapping[str, Any] = {"order": "number" if output is Format.TABLE else "completed"}
    last = array
    for last in broker.array_progress(array):
        show_bar(last)
    for item in broker.array_items(array, **after):
        _print_item(item, output)
    if last.state is ArrayState.CANCELLED:
        eprint(f"cancelled: {last.total - last.done} of {last.total} items were left")
        raise typer.Exit(EXIT_CANCELLED)
    if last.state is not ArrayState.SUCCEEDED:
        rest = f", {last.total - last.done} were left" if last.done < last.total else ""
        eprint(f"{last.failed} of {last.total} items failed{rest}; again: gpubroker array {last.id} --retry")
        raise typer.Exit(EXIT_TASK_FAILED)


def _print_item(item: ArrayItem, output: Format) -> None:
    if output is not Format.TABLE:
        show(json.dumps(item.raw))
    elif item.error is not None:
        show(f"item {item.number}: {item.error.kind}: {item.error.message}", error=True)
    else:
        show(json.dumps(item.result) if item.data is None else f"({len(item.data)} bytes, pickled)")


def _drawn(array: Array) -> str:
    workers = ", ".join(f"{worker.id} {worker.state}" for worker in array.workers)
    return f"{array.id} {array.state.value}\n{bar_line(array)}\nworkers: {workers}"


def _items_of(path: str, read: Callable[[str], Any]) -> Iterator[Any]:
    """Read the items, skipping empty lines. Raises BadParameter."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        lines = data.decode().split("\n")  # JSON may contain other characters that end a line of text
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise typer.BadParameter(
            f"{path} is not UTF-8: byte {error.start} is {data[error.start]:#x}"
        ) from None
    yield from (read(line.removesuffix("\r")) for line in lines if line.strip())
