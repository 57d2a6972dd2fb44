"""Why a task waits, what would help, and what-if questions."""
