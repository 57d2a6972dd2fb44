"""Which models are in memory, and asking the leader to load one."""
