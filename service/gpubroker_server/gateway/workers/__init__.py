"""Worker sets: stateful workers that take calls."""
