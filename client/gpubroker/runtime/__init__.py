"""The code that runs inside a user's process. It needs only the standard library and cloudpickle."""

from gpubroker.runtime.task import CheckpointTooLarge, NoCurrentTask, RunningTask, Stopped, current_task

__all__ = ["CheckpointTooLarge", "NoCurrentTask", "RunningTask", "Stopped", "current_task"]
