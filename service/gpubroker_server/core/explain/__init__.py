"""Explanations of a waiting task: its reasons, its remedies, and whether a fleet is large enough."""
