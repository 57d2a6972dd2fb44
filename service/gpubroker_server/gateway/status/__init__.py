"""A task as answers show it: its row, its devices, why it waits, its result."""
