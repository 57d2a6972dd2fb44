"""Speaks HTTP: parses, admits, stores, and shows. It decides nothing and changes no state."""
