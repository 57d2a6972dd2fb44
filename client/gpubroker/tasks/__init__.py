"""Submit tasks, follow them and get their results."""
