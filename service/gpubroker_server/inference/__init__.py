"""The data plane's half towards clients: Triton's protocol under /v2, on the port of everything else."""
