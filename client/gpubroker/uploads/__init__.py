"""Directories that are sent with tasks: which files are sent, and in which form."""
