"""The protocols of clients and model servers. `triton` is what the two protocols of Triton share."""
