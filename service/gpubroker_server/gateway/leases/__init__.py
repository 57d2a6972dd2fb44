"""Routes that ask for, renew and release external leases."""
