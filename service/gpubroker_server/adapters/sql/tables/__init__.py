"""All tables, and which schema this release needs."""
