"""Fleet health: targets and their controller, idle devices, backpressure, work streams, disks, findings."""
