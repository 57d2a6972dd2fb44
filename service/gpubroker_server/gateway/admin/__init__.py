"""Tokens, health, metrics and the orderly stop."""
