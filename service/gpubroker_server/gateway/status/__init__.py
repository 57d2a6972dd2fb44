"""The views of a task in answers: its row, its devices, the reason why it waits, and its result."""
