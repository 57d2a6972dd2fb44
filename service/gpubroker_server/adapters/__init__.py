"""The world outside: one folder per foreign thing, each behind a Protocol of `ports`."""
