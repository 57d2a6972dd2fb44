"""Routes that submit, list, read, change and cancel tasks, wait for them, and return their results."""
