"""What tenants may take, what they are guaranteed, and whose turn it is."""
