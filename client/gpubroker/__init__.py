"""Python SDK and command line of gpubroker."""
