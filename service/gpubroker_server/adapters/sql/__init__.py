"""The task store in SQL: SQLite for one process, PostgreSQL for several."""
