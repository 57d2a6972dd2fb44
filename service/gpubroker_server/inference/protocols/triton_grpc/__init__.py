"""Triton's gRPC protocol: the port, calls and streams."""
