"""What runs inside a user's process: standard library and cloudpickle only."""
