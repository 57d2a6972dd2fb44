"""The cluster: devices, nodes, tenants, policy, quarantine, totals."""
