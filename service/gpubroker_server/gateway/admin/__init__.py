"""Routes of tokens, secrets, health, metrics and the orderly stop."""
