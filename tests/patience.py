"""How long tests wait for what must come."""

PATIENCE_SECONDS = 120.0
"""Claims nothing: on a busy machine all comes later. What must come in time is measured where it is said."""
