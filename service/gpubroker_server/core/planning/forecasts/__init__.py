"""When waiting tasks will start, and what is reserved for them."""
