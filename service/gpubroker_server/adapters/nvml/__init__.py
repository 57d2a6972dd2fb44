"""What is in this machine: real GPUs through NVML, or simulated ones from the configuration."""
