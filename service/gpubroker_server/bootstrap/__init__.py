"""The composition root: settings become adapters, adapters become one running service."""
