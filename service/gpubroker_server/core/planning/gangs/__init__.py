"""Places for all ranks of a gang at once."""
