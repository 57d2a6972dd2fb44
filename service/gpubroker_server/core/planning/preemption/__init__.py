"""The choice of the runs that are stopped so that a task can start."""
