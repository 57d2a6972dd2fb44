"""How a task ended, told to a person or a program: the result, or why there is none."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gpubroker.cli import EXIT_INTERRUPTED
from gpubroker.cli.session import Format, emit, say
from gpubroker.errors import Unreachable

if TYPE_CHECKING:
    from gpubroker.broker import Broker
    from gpubroker.tasks.task import Outcome


def wait_and_show(broker: "Broker", task: str, timeout_seconds: float | None, output: Format) -> None:
    """Wait, then print the result. Raises what the exit codes stand for."""
    wait(broker, task, timeout_seconds)
    show(broker.outcome(task), output)


def wait(broker: "Broker", task: str, timeout_seconds: float | None) -> None:
    """Who waits for a task waits for a service as well that is started again meanwhile, as the SDK does."""
    from gpubroker.broker import Broker

    goes_on = f"the task goes on; wait again: gpubroker wait {task}   stop it: gpubroker cancel {task}"
    try:
        with Broker(broker.connection.url, broker.connection.token) as patient:
            patient.wait(task, timeout_seconds)
    except KeyboardInterrupt:
        say(goes_on)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except Unreachable as fault:
        fault.add_note(goes_on)
        raise


def show(outcome: "Outcome", output: Format, save: Path | None = None) -> None:
    """Print a result, or write it to `save`. A pickled one is never opened here, only saved."""
    from gpubroker.operations import check_success

    if output is not Format.TABLE:
        emit(output, outcome, lambda _: "")
    try:
        check_success(outcome)
    finally:
        if outcome.log_tail:
            say(log_of(outcome).rstrip())
    if save is not None:
        save.write_bytes(_bytes_of(outcome))
        say(f"wrote {save}")
    elif output is Format.TABLE:
        if outcome.data is not None:
            say(
                f"the result is a pickled object of {len(outcome.data)} bytes; save it with --save FILE, or "
                "open it in Python with Broker().result(...)"
            )
        else:
            value = outcome.value
            typer.echo(value if isinstance(value, str) else json.dumps(value, indent=2))
    sys.stdout.flush()


def log_of(outcome: "Outcome") -> str:
    """The end of what the task printed, from the first whole line on; what is missing is said."""
    from gpubroker.runtime.output import TAIL_BYTES

    printed = outcome.log_tail
    if len(printed.encode()) < TAIL_BYTES:
        return printed
    _, newline, rest = printed.partition("\n")
    whole = rest if newline else printed
    return f"[only the last {TAIL_BYTES // 1024} KiB were kept]\n{whole}"


def _bytes_of(outcome: "Outcome") -> bytes:
    return outcome.data if outcome.data is not None else json.dumps(outcome.value).encode()
