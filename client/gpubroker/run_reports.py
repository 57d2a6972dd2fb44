"""Reports of a command from inside its run: lines in a file that the run's process reads.

Standard library only, so that a command loads nothing else to report.
"""

import os
import select
from typing import NamedTuple

from gpubroker.errors import WrongArgument

REPORTS_VARIABLE = "GPUBROKER_REPORTS"
"""The variable that names the file in the environment of a command."""

RUN_VERBS = ("progress", "checkpoint", "complete")

_ROUNDING = 0.01
"""The amount by which a fraction may lie outside 0..1, because sums of steps are seldom exact."""

_FORMS = "progress FRACTION [MESSAGE], checkpoint [URI] or complete"


class Progress(NamedTuple):
    fraction: float | None
    message: str


class Checkpoint(NamedTuple):
    uri: str | None
    """The place where the state is saved; None if the command itself knows it."""


class Complete(NamedTuple):
    """States that the work of the run is done, however the command ends after a stop notice."""


Said = Progress | Checkpoint | Complete


def read_line(line: str) -> Said:
    """Return the report that a line holds. Raises ValueError if the line is no known report."""
    verb, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    match verb:
        case "progress" if rest:
            first, _, message = rest.partition(" ")
            try:
                fraction = float(first)
            except ValueError:
                return Progress(None, rest)
            return Progress(share_of(fraction), message.strip())
        case "checkpoint":
            return Checkpoint(rest or None)
        case "complete" if not rest:
            return Complete()
    raise ValueError(f"expected {_FORMS}; found {line.strip()[:200]!r}")


def share_of(fraction: float) -> float:
    """Return the fraction, rounded into 0..1. Raises ValueError if it lies outside by more than rounding."""
    share = min(1.0, max(0.0, fraction))
    if abs(fraction - share) < _ROUNDING:
        return share
    raise ValueError(f"progress takes a fraction from 0 to 1; found {fraction}; pass done / all")


def line_of(verb: str, *words: str) -> str:
    """Return the line with which a command makes this report. Raises ValueError if the report is unknown.

    A place that is a file on this machine is written as an absolute path, because the reader may work in
    another directory.
    """
    if verb == "checkpoint" and words and ":" not in words[0] and os.path.exists(words[0]):
        words = (os.path.abspath(words[0]), *words[1:])
    line = " ".join([verb, *words]).replace("\n", " ")
    read_line(line)
    if len(line.encode()) >= select.PIPE_BUF:
        raise ValueError(f"a report has less than {select.PIPE_BUF} bytes; this one has {len(line.encode())}")
    return line


def report(verb: str, *words: str) -> None:
    """Write a report for the process of the run to read. Raises WrongArgument outside of a command's run, and
    for an invalid report."""
    try:
        line = line_of(verb, *words)
    except ValueError as fault:
        raise WrongArgument(str(fault)) from None
    path = os.environ.get(REPORTS_VARIABLE)
    if not path:
        raise WrongArgument(
            f"{REPORTS_VARIABLE} is not set: {verb} works inside a command that gpubroker runs; a function "
            "reports by gpubroker.current_task()"
        )
    try:
        # Without waiting: once the run's process has ended, nothing reads the file any more.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as fault:
        raise WrongArgument(f"{path} takes no reports: {fault.strerror}; has the run ended?") from None
    with os.fdopen(descriptor, "wb", 0) as file:
        os.set_blocking(descriptor, True)
        file.write(f"{line}\n".encode(errors="replace"))
