"""Programs that use gpubroker. `make demo` runs examples.demo."""
