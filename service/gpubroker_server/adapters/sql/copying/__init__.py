"""Copy all rows of a database: for the move to PostgreSQL, for a backup, and for the restore of a backup."""
