"""What the tasks of these tests do. Files are their witnesses: they see what no database can."""

import asyncio
import time
from pathlib import Path

from gpubroker import Stopped, current_task


def add(a: int, b: int) -> int:
    return a + b


async def add_later(a: int, b: int) -> int:
    await asyncio.sleep(0)
    return a + b


def fail(message: str) -> None:
    raise ValueError(message)


def hold(witness: str, until: str) -> int:
    """Write one line at its start, and return its attempt once the file `until` is there."""
    task = current_task()
    with Path(witness).open("a", encoding="utf-8") as lines:
        lines.write(f"{task.id} {task.attempt}\n")
    while not Path(until).exists():
        if task.should_stop:
            raise Stopped
        time.sleep(0.01)
    return task.attempt


def count(witness: str, steps: int, step_seconds: float = 0.01) -> list[int]:
    """Count, one checkpoint a step; every step is witnessed, so that a lost or repeated one shows."""
    task = current_task()
    done: list[int] = list(task.resume_state or [])
    for step in range(len(done), steps):
        with Path(witness).open("a", encoding="utf-8") as lines:
            lines.write(f"{step}\n")
        done.append(step)
        task.checkpoint(done)
        task.progress((step + 1) / steps, f"step {step + 1} of {steps}")
        if task.should_stop:
            raise Stopped
        time.sleep(step_seconds)
    return done
