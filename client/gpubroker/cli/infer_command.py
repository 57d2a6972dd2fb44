"""`gpubroker infer`: ask a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from gpubroker.cli import parsing
from gpubroker.cli.lookup import connect, remember_last
from gpubroker.cli.printing import Format, Output, emit, eprint
from gpubroker.cli.tasks.results import wait_and_show

if TYPE_CHECKING:
    from gpubroker.models.inference import InferLaterOptions


_WORDS: Mapping[type, str] = {
    int: "numbers", float: "numbers", bool: "booleans", str: "texts", list: "lists", type(None): "null",
}  # fmt: skip


def infer(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model on its server.")],
    inputs: Annotated[
        list[str],
        typer.Option(
            "--input",
            "-i",
            metavar="NAME[:DATATYPE]=JSON",
            help="A number, a text or nested lists of them; repeatable. Else INT64, FP32, BOOL or BYTES.",
        ),
    ],
    outputs: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="Only this output; repeatable.")
    ] = None,
    version: Annotated[str | None, typer.Option(help="Version of the model.")] = None,
    priority: Annotated[
        Any, typer.Option(parser=parsing.priority, metavar="PRIORITY", help="0 to 100, or a band.")
    ] = None,
    later: Annotated[bool, typer.Option("--later", help="Do not wait; print the id of the task.")] = False,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", parser=parsing.seconds, metavar="DURATION", help="Longest time to wait."),
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Ask a model: queue a request for it, wait for the answer and print it.

    \b
    gpubroker infer resnet -i image:FP32=[[0.1,0.2,0.3]] --priority interactive
    """
    given = {"outputs": outputs, "version": version, "priority": priority}
    options = cast("InferLaterOptions", {name: value for name, value in given.items() if value is not None})
    tensors = dict(_tensor(name, text) for name, text in parsing.pairs(inputs, "--input").items())
    with connect() as broker:
        task = broker.infer_later(model, tensors, **options)
        remember_last(broker, task.id)
        if later:
            emit(output, task, lambda task: task.id)
            return
        eprint(f"accepted {task.id}")
        wait_and_show(broker, task.id, timeout, output)


def _tensor(name: str, text: str) -> tuple[str, dict[str, Any]]:
    """Return the tensor in the form of Triton's protocol, which needs no numpy. Raises BadParameter."""
    name, _, datatype = name.partition(":")
    shape: list[int] = []
    values = [parsing.json_or_text(text)]
    level = values[0]
    while isinstance(level, list):
        shape.append(len(level))
        level = level[0] if level else None
    for length in shape:
        if any(not isinstance(part, list) or len(part) != length for part in values):
            raise typer.BadParameter(f"the lists of input {name} differ in length: a tensor is rectangular")
        values = [value for part in values for value in part]
    kind = datatype.upper() or _datatype(name, values)
    return name, {"datatype": kind, "shape": shape or [1], "data": values}


def _datatype(name: str, values: list[Any]) -> str:
    kinds = {type(value) for value in values}
    for datatype, fit in (("BOOL", {bool}), ("INT64", {int}), ("FP32", {int, float}), ("BYTES", {str})):
        if values and kinds <= fit:
            return datatype
    found = ", ".join(sorted({_WORDS.get(kind, kind.__name__) for kind in kinds})) or "none"
    raise typer.BadParameter(
        f"input {name} needs numbers, booleans or texts, all of one kind; found {found}; or name the "
        f"datatype: {name}:FP32=[...]"
    )
