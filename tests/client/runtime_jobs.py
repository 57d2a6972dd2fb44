"""Functions that runs of one process call by name, where they can meet."""

import logging
import sys
import threading

from gpubroker import current_task

COMPANY = 4
_everybody = threading.Barrier(COMPANY)


def meet() -> str:
    """Back when COMPANY runs are here at the same time."""
    _everybody.wait(10)
    return current_task().id


def print_in_company(name: str) -> None:
    print("I am", name)
    _everybody.wait(10)
    logging.StreamHandler().emit(logging.LogRecord("x", logging.INFO, "", 0, f"logged by {name}", None, None))
    print("bye", file=sys.stderr)
