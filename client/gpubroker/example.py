"""A training for `gpubroker serve --demo`: it needs no GPU, no data and no library, and only sleeps.

It reports what a real training would: its progress, and after each epoch a checkpoint with all that it needs
to resume. It can be stopped at any time, and loses at most one epoch.
"""

import time

from gpubroker import Stopped, current_task


def fit(epochs: int = 60, epoch_seconds: float = 1.0) -> dict[str, float]:
    task = current_task()
    state = task.resume_state or {"epoch": 0, "loss": 1.0}
    while state["epoch"] < epochs:
        time.sleep(epoch_seconds)
        state = {"epoch": state["epoch"] + 1, "loss": state["loss"] * 0.95}
        print(f"epoch {state['epoch']}: loss {state['loss']:.3f}")
        task.checkpoint(state)
        task.progress(state["epoch"] / epochs, f"epoch {state['epoch']} of {epochs}")
        if task.should_stop:
            raise Stopped
    return {**state, "attempt": task.attempt}
