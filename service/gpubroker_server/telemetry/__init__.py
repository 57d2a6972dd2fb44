"""Names of metrics and log fields, and how they are counted and written."""
