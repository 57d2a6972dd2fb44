"""Submit tasks and read their answers."""
