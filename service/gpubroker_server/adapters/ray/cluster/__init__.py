"""A Ray cluster of several nodes on this machine, for `gpubroker cluster`."""
