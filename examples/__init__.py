"""Programs that show how gpubroker is used. `make demo` runs examples.demo."""
