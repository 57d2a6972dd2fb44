"""Complete stand-ins that live in memory: for tests, for trying things out, never for keeping things."""
