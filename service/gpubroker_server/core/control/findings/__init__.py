"""Findings about the fleet, each with a remedy: pure functions, a module per subject."""
