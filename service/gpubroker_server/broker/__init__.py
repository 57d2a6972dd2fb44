"""The loops of the one leader: observe what happened, plan, commit, and only then act."""
