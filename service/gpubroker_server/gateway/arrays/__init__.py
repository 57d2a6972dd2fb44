"""Arrays: one function or command for many items."""
