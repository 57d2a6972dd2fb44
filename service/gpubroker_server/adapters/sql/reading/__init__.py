"""Reads that never wait for the writer."""
