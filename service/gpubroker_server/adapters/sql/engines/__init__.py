"""SQLite and PostgreSQL: connections, sessions, sets of rows."""
