"""Directories that travel with tasks: what is sent of one, and in which form."""
