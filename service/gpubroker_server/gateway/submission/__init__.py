"""A task on its way into the store: what it asks for, what it may do, one commit."""
