"""Tasks: submit, list, read, change, cancel, wait, result."""
