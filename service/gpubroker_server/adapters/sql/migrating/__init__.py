"""Bringing a database to a schema with alembic."""
