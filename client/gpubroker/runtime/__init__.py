"""What runs inside a user's process: standard library and cloudpickle only."""

from gpubroker.runtime.task import CheckpointTooLarge, NoCurrentTask, RunningTask, Stopped, current_task

__all__ = ["CheckpointTooLarge", "NoCurrentTask", "RunningTask", "Stopped", "current_task"]
