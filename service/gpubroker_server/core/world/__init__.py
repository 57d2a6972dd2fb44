"""The picture of the cluster, built from the event log and from nothing else."""
