"""Routes that read the event log."""
