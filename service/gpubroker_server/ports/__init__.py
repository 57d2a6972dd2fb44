"""Protocols of everything outside the process that the service uses, one file per port."""
