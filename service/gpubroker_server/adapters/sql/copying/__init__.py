"""Copies of all rows of a database: the move to PostgreSQL, backups, and the restore of a backup."""
