"""Functions that runs of one process call by name, where they can meet."""

import logging
import sys
import threading
import time
from pathlib import Path

from gpubroker import Stopped, current_task

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


ONCE: list[int] = []
BEGAN = threading.Event()


def fails_odd_and_once(item: int) -> int:
    if item % 2:
        raise ValueError("odd")
    if item == 2 and not ONCE:
        ONCE.append(item)
        raise RuntimeError("once")
    return item


def waits_for_notice(_item: int) -> None:
    BEGAN.set()
    current_task().wait_for_stop()
    raise Stopped


def is_stuck(_item: int) -> None:
    """In a wait that no exception reaches."""
    BEGAN.wait()


def fails_and_is_stuck(item: int) -> None:
    if item not in ONCE:
        ONCE.append(item)
        raise ValueError("once")
    BEGAN.wait()


def waits_for_file(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.01)
