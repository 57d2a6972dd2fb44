"""All rows of one database in another: a move to PostgreSQL, a backup, and a backup that is restored."""
