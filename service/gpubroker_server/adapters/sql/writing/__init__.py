"""The one writer: many requests in one transaction, each statement guarded."""
