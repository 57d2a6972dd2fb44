"""Which runs are stopped so that a task can start."""
