"""`gpubroker submit --batch FILE`: many tasks, one JSON object per line."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from gpubroker.cli import EXIT_REFUSED
from gpubroker.cli.printing import Format, eprint, print_drawn
from gpubroker.cli.tables import Column, PlainTable
from gpubroker.errors import BrokerError

if TYPE_CHECKING:
    from gpubroker.broker import Broker

_REASONS_SHOWN = 20


def submit_file(broker: "Broker", path: str, key: str | None, all_or_nothing: bool, output: Format) -> None:
    """Submit the tasks of a file. Print the ids, in order, to standard output, and refused lines to standard
    error. Exit with 6 if any task was refused."""
    numbered_tasks = list(_tasks_of(path))
    answers = broker.submit_many(
        [task for _, task in numbered_tasks], all_or_nothing=all_or_nothing, idempotency_key=key
    )
    numbered_answers = [(number, answer) for (number, _), answer in zip(numbered_tasks, answers, strict=True)]
    refused = [(number, answer) for number, answer in numbered_answers if isinstance(answer, BrokerError)]
    accepted = [answer for _, answer in numbered_answers if isinstance(answer, str)]
    if output is Format.TABLE:
        for task in accepted:
            typer.echo(task)
    elif output is Format.JSON:
        typer.echo(json.dumps([_row(number, answer) for number, answer in numbered_answers], indent=2))
    else:
        for number, answer in numbered_answers:
            typer.echo(json.dumps(_row(number, answer)))
    if refused:
        print_drawn(refused_table(refused), error=True)
    eprint(f"{len(accepted)} accepted, {len(refused)} refused")
    if refused:
        raise typer.Exit(EXIT_REFUSED)


def _tasks_of(path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield line numbers and tasks, skipping empty lines. Raises BadParameter for an invalid line."""
    try:
        text = sys.stdin.read() if path == "-" else open(path, encoding="utf-8").read()  # noqa: SIM115
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror}") from None
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                task = json.loads(line)
            except ValueError as error:
                raise typer.BadParameter(
                    f"line {number} of {path} is not JSON ({error}); nothing was sent; write one task per "
                    'line, as in POST /tasks: {"run": {"entrypoint": "module:function"}}'
                ) from None
            yield number, task


def _row(number: int, answer: str | BrokerError) -> dict[str, Any]:
    if isinstance(answer, str):
        return {"line": number, "id": answer}
    return {"line": number, "code": answer.code, "detail": answer.detail, "errors": list(answer.errors)}


def refused_table(refused: Sequence[tuple[int, BrokerError]]) -> PlainTable:
    """Return a table with one row for each code and place of a fault: the numbers of its lines, and the
    message for the first of these lines."""
    by_reason: dict[tuple[str, str], list[tuple[int, BrokerError]]] = {}
    for number, error in refused:
        by_reason.setdefault((error.code, _where(error)), []).append((number, error))
    rows = [
        (_spans([number for number, _ in refusals]), code, where, refusals[0][1].detail)
        for (code, where), refusals in list(by_reason.items())[:_REASONS_SHOWN]
    ]
    if len(by_reason) > _REASONS_SHOWN:
        rows.append(("...", "", "", f"{len(by_reason) - _REASONS_SHOWN} more reasons"))
    columns = (Column("LINES", share=0.2), Column("CODE"), Column("WHERE"), Column("WHY", wraps=True))
    return PlainTable(columns, rows)


def _where(error: BrokerError) -> str:
    """Return the JSON pointer inside the task, without the task's position in its batch."""
    pointer = str(error.errors[0].get("pointer", "")) if error.errors else ""
    # `/tasks/7/run` becomes `/run`.
    return "/" + "/".join(pointer.split("/")[3:]) if pointer.startswith("/tasks/") else pointer


def _spans(numbers: Sequence[int]) -> str:
    """Return the numbers as text, such as `1-3, 7`, with at most five spans."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in spans[:5]]
    return ", ".join(parts) + (f" and {len(spans) - 5} more" if len(spans) > 5 else "")
