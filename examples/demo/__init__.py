"""A live demo: fill two GPUs, preempt for a critical task, resume from checkpoints, compare the results."""
