"""What the tasks of the kill loop do: each run writes down when it began and when it ended, itself."""

import json
import os
import time
from typing import Any

from gpubroker import Stopped, current_task


def work(witness: str, seconds: float, gpu_mb: int = 0) -> int:
    """Hold what it was given for so long, unless it is told to stop. Returns its attempt."""
    task = current_task()
    run: dict[str, Any] = {"task": task.id, "fence": task.attempt, "pid": os.getpid()}
    note(witness, what="start", devices=list(task.devices), mb=gpu_mb, **run)
    stopped = task.wait_for_stop(seconds)
    note(witness, what="stop", **run)
    if stopped:
        raise Stopped
    return task.attempt


def note(path: str, **line: Any) -> None:
    """One line in one write, so that lines of many processes never mix, and none is cut short by a kill."""
    text = json.dumps({"at": time.time(), **line}) + "\n"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)
