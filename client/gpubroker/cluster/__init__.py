"""Devices, nodes, policy, quarantine and planned fleets as the service answers them."""
