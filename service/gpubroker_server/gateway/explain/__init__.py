"""Explanations of a waiting task, its remedies, and what-if questions."""
