"""`gpubroker wait`, `result` and `logs`: how a task ended, and what it returned and printed."""

from __future__ import annotations

import json
import sys
import threading
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from gpubroker.cli import EXIT_INTERRUPTED, parsing
from gpubroker.cli.lookup import TaskWord, WorkerId, connect, task_id
from gpubroker.cli.printing import Format, Output, emit, eprint, show
from gpubroker.cli.tables import short_id, with_short_ids
from gpubroker.cli.tasks.view import task_details
from gpubroker.errors import Unreachable, WaitTimeout
from gpubroker.runtime.output import STREAMS, LogStream

if TYPE_CHECKING:
    from gpubroker.broker import Broker
    from gpubroker.tasks.log_reading import LogOptions
    from gpubroker.wire.tasks import Outcome

SILENT_SECONDS = 3.0
"""The seconds after which a person who waits for a task is told why it waits."""

Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout", parser=parsing.seconds, metavar="DURATION", help="Longest time to wait, such as 90s."
    ),
]


def wait(task: TaskWord, timeout: Timeout = None, output: Output = Format.TABLE) -> None:
    """Wait until a task is finished. The exit code says how it ended."""
    with connect() as broker:
        wanted = task_id(broker, task)
        _wait(broker, wanted, timeout)
        emit(output, broker.get(wanted), task_details)
        _check_success(broker.outcome(wanted))


def result(
    task: TaskWord,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Wait until the task is finished.")] = False,
    timeout: Timeout = None,
    save: Annotated[Path | None, typer.Option(help="Write the result to this file.")] = None,
    output: Output = Format.TABLE,
) -> None:
    """Print the result of a finished task, and its log to standard error."""
    with connect() as broker:
        wanted = task_id(broker, task)
        if wait:
            _wait(broker, wanted, timeout)
        _show(broker.outcome(wanted), output, save)


def logs(
    task: TaskWord,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the task has ended; wait for it to start.")
    ] = False,
    attempt: Annotated[int | None, typer.Option(help="Attempt. Default: the newest.")] = None,
    stream: Annotated[
        str | None,
        typer.Option(help="stdout or stderr, by default both; or setup: what its environment took."),
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Rank of a gang. Default: 0.")] = None,
    worker: WorkerId = None,
) -> None:
    """Print what a task has printed: its standard output to yours, its standard error to yours."""
    if stream not in (None, *get_args(LogStream)):
        raise typer.BadParameter(f"--stream is stdout, stderr or setup, not {stream!r}")
    filters = {"follow": follow or None, "attempt": attempt, "rank": rank, "worker": worker}
    options = cast("LogOptions", {name: value for name, value in filters.items() if value is not None})
    with connect() as broker:
        id = task_id(broker, task)
        if stream is None:
            show_logs(broker, id, options)
        else:
            _show_log(broker, id, {**options, "stream": cast("LogStream", stream)})


def follow_and_show(broker: Broker, task: str, output: Format) -> None:
    """Print what the task prints until it ends, then its result. Raises the errors that exit codes stand
    for."""
    try:
        show_logs(broker, task, {"follow": True})
    except KeyboardInterrupt:
        eprint(f"the task continues; read on: gpubroker logs -f {task}   stop it: gpubroker cancel {task}")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    _show(broker.outcome(task), output, shows_log=False)


def show_logs(broker: Broker, task: str, wanted: LogOptions) -> None:
    """Print both streams of a task; while the log is followed, side by side."""
    if not wanted.get("follow"):
        for stream in STREAMS:
            _show_log(broker, task, {**wanted, "stream": stream})
        return
    from gpubroker.broker import Broker

    faults: list[BaseException] = []
    # A broker with the retry time of the SDK survives a restart of the service.
    with Broker(broker.connection.url, broker.connection.token) as patient:

        def follow_errors() -> None:
            try:
                _show_log(patient, task, {**wanted, "stream": "stderr"})
            except BaseException as fault:
                faults.append(fault)

        errors_thread = threading.Thread(target=follow_errors, daemon=True)
        errors_thread.start()
        _show_log(patient, task, {**wanted, "stream": "stdout"})
        errors_thread.join()
    for fault in faults:
        raise fault


def _show_log(broker: Broker, task: str, wanted: LogOptions) -> None:
    for line in broker.logs(task, **wanted):
        show(line, end="", error=wanted.get("stream") == "stderr")


def wait_and_show(broker: Broker, task: str, timeout_seconds: float | None, output: Format) -> None:
    """Wait for the task, then print its result. Raises the errors that exit codes stand for."""
    _wait(broker, task, timeout_seconds)
    _show(broker.outcome(task), output)


def _wait(broker: Broker, task: str, timeout_seconds: float | None) -> None:
    """Wait with the retry time of the SDK, which survives a restart of the service. After a while, a person
    is told why the task waits."""
    from gpubroker.broker import Broker

    hint = f"the task continues; wait again: gpubroker wait {task}   stop it: gpubroker cancel {task}"
    try:
        with Broker(broker.connection.url, broker.connection.token) as patient:
            _wait_aloud(patient, task, timeout_seconds)
    except KeyboardInterrupt:
        eprint(hint)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except Unreachable as fault:
        fault.add_note(hint)
        raise


def _wait_aloud(broker: Broker, task: str, timeout_seconds: float | None) -> None:
    left = inf if timeout_seconds is None else timeout_seconds
    try:
        broker.wait(task, min(left, SILENT_SECONDS))
    except WaitTimeout:
        if left <= SILENT_SECONDS:
            raise
        found = broker.get(task)
        if found.state == "pending" and found.pending:
            place = f"position {found.pending.position}, " if found.pending.position else ""
            message = with_short_ids(found.pending.message)
            eprint(f"{place}{found.pending.reason}: {message}; more: gpubroker explain {short_id(task)}")
        broker.wait(task, None if timeout_seconds is None else left - SILENT_SECONDS)


def _show(outcome: Outcome, output: Format, save: Path | None = None, *, shows_log: bool = True) -> None:
    """Print a result, or write it to `save`. A pickled result is never opened, only saved."""
    if output is not Format.TABLE:
        emit(output, outcome, lambda _: "")
    try:
        _check_success(outcome)
    finally:
        if shows_log and outcome.log_tail:
            eprint(_log_of(outcome).rstrip())
    if save is not None:
        data = outcome.data if outcome.data is not None else json.dumps(outcome.value).encode()
        save.write_bytes(data)
        eprint(f"wrote {save}")
    elif output is Format.TABLE and outcome.data is not None:
        eprint(
            f"the result is a pickled object of {len(outcome.data)} bytes; save it with --save FILE, or open "
            "it in Python with Broker().result(...)"
        )
    elif output is Format.TABLE:
        value = outcome.value
        show(value if isinstance(value, str) else json.dumps(value, indent=2))
    sys.stdout.flush()


def _check_success(outcome: Outcome) -> None:
    from gpubroker.tasks.task import check_success

    check_success(outcome)


def _log_of(outcome: Outcome) -> str:
    """Return the end of the task's output, from the beginning of a line. A first line says if something is
    missing."""
    from gpubroker.runtime.output import TAIL_BYTES

    printed = outcome.log_tail
    if len(printed.encode()) < TAIL_BYTES:
        return printed
    _, newline, rest = printed.partition("\n")
    whole = rest if newline else printed
    return f"[only the last {TAIL_BYTES // 1024} KiB were kept]\n{whole}"
