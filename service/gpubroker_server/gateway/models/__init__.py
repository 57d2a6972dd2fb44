"""Routes that list, load, unload, pin and measure models on Triton servers."""
