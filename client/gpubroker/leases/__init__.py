"""Lease GPU memory for programs that the broker does not start."""
