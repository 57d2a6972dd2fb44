"""Complete adapters that live in memory: for tests and for trying things out. They keep nothing."""
