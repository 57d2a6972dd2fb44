"""The main job, live: fill two GPUs, preempt for a critical task, resume from checkpoints, compare."""
