"""Quotas, guarantees and the fair-share order of tenants."""
