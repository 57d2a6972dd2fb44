"""What users install, and what they start it with."""
