"""The tasks of chaos runs: each run records its start and its end in a file."""

import json
import os
import time
from typing import Any

from gpubroker import Stopped, current_task


def work(witness: str, seconds: float, gpu_mb: int = 0) -> int:
    """Run for `seconds` unless asked to stop. Returns the number of the attempt."""
    task = current_task()
    run: dict[str, Any] = {"task": task.id, "fence": task.attempt, "pid": os.getpid()}
    append_line(witness, what="start", devices=list(task.devices), mb=gpu_mb, **run)
    stopped = task.wait_for_stop(seconds)
    append_line(witness, what="stop", **run)
    if stopped:
        raise Stopped
    return task.attempt


def append_line(path: str, **fields: Any) -> None:
    """One JSON line in one write: lines of several processes do not mix, and a kill does not cut one."""
    text = json.dumps({"at": time.time(), **fields}) + "\n"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)
