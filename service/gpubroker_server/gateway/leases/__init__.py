"""External leases: ask, renew, release."""
