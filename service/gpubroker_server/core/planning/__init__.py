"""Which task starts, where, and which runs must leave for it."""
