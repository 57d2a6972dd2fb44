"""The nouns and their rules: task, lease, device, demand, policy, orders, decisions."""
