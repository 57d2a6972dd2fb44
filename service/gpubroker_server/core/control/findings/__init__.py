"""Findings about the fleet, each with a remedy. They are found by pure functions, with one module per
subject."""
