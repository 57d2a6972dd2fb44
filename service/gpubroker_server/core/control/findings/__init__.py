"""What is wrong with the fleet, and what to do about it: pure functions, a module per subject."""
