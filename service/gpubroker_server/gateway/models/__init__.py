"""Models on Triton servers: list, load, unload, pin."""
