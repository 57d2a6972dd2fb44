"""Routes that explain why a task waits, propose remedies, and answer what-if questions."""
