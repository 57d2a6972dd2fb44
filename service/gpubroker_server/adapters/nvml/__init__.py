"""The GPUs of this machine: real ones through NVML, or simulated ones from the configuration."""
