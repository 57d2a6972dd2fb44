"""The `gpubroker` command line."""

import io
import sys

from gpubroker import errors
from gpubroker.run_reports import RUN_VERBS, report
from gpubroker.tasks.naming import SHOWN_ID_LENGTH as SHOWN_ID_LENGTH

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_TASK_FAILED = 3
EXIT_CANCELLED = 4
EXIT_WAIT_TIMEOUT = 5
EXIT_REFUSED = 6
EXIT_UNREACHABLE = 7
EXIT_NOT_NOW = 8
"""The exit code if the task would wait, or the components do not fit."""
EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command line and exit with one of the codes above."""
    words = sys.argv[1:]
    try:
        if words and words[0] in RUN_VERBS and not any(word.startswith("-") for word in words):
            # A command may report often; without the command line's libraries that takes a tenth of the time.
            report(*words)
            sys.exit(EXIT_OK)
        _write_what_the_terminal_lacks()
        from gpubroker.cli.app import app

        app()
    except (errors.BrokerError, errors.WrongArgument) as error:
        from gpubroker.cli.printing import eprint

        message = str(error)
        if isinstance(error, errors.Refused):  # the text of another error may quote a task
            from gpubroker.cli.refusals import in_own_words

            message = in_own_words(message, words)
        for line in (f"gpubroker: {message}", *getattr(error, "__notes__", ())):
            eprint(line)
        sys.exit(exit_code(error))


def _write_what_the_terminal_lacks() -> None:
    """Make a terminal or pipe that is not UTF-8 show a ? for a character that it lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="replace")


def exit_code(error: errors.BrokerError | errors.WrongArgument) -> int:
    match error:
        case errors.WrongArgument():
            return EXIT_USAGE
        case errors.TaskFailed():
            return EXIT_TASK_FAILED
        case errors.TaskCancelled():
            return EXIT_CANCELLED
        case errors.WaitTimeout():
            return EXIT_WAIT_TIMEOUT
        case errors.Refused():
            return EXIT_REFUSED
        case errors.Unreachable():
            return EXIT_UNREACHABLE
        case errors.ModelUnavailable(retry_after_seconds=float()):
            return EXIT_NOT_NOW
        case _:
            return EXIT_ERROR
