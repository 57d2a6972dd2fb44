"""The event log as clients read it."""
