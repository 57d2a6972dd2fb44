"""Why a task waits, what would help, and whether a fleet is large enough."""
