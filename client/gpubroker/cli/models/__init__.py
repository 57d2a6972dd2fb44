"""Commands about models and uploaded objects."""
