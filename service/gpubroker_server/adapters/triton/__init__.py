"""Triton Inference Server: the upstream half of the data plane."""
