"""The protocols of clients and model servers. `triton` has the common part of Triton's two protocols."""
