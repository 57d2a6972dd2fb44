"""Routes about the cluster: devices, nodes, tenants, policy, quarantine and totals."""
