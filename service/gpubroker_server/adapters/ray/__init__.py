"""Ray as the executor: a local head or a cluster to join, one agent per node, one process per run."""
