"""Look at the cluster and plan for it: devices, nodes, tenants, policy, quarantine, planned fleets."""
