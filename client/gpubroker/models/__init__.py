"""Ask models on Triton, at once or queued, and move them in and out of GPU memory."""
