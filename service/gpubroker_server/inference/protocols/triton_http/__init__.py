"""Triton's HTTP protocol: connections of clients, and requests on them."""
