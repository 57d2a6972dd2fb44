"""Rows that operators put."""
