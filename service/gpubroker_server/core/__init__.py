"""Decisions as pure functions over plain values: no clock, no randomness, no input or output."""
