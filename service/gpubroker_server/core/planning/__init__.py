"""The choice of the task that starts, of its place, and of the runs that must leave for it."""
