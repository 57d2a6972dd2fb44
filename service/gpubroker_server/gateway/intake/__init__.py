"""From the body of a request to a task in the store: demand, permission, capacity, one commit."""
