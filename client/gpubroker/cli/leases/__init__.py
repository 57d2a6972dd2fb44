"""Commands about external leases."""
