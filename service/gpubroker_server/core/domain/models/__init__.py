"""Models as holders of GPU memory: terms, orders, sizes, residency."""
