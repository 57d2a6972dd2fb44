"""What each node has, would have, and could have if runs left."""
