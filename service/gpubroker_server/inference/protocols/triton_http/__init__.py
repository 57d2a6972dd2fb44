"""Triton's HTTP protocol: connections of clients, and the requests on them."""
