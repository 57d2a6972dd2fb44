"""The room of each node: what it has, would have, and could have if runs left."""
