"""Commands about tasks."""
