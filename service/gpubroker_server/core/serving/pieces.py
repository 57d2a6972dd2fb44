"""Joins the parts of a message that are written to a connection."""

from collections.abc import Sequence

JOINED_BYTES = 16 * 1024


def joined(parts: Sequence[bytes]) -> Sequence[bytes]:
    """Return the parts as one piece, so that they leave together. A large last part is not copied: then they
    are returned as they are."""
    if len(parts) == 1 or len(parts[-1]) > JOINED_BYTES:
        return parts
    return (b"".join(parts),)
