"""The gpubroker service; other programs use the gpubroker package instead."""
