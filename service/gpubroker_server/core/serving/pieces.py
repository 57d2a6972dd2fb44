"""Join the parts of a message that are written to a connection."""

from collections.abc import Sequence

JOINED_BYTES = 16 * 1024


def joined(parts: Sequence[bytes]) -> Sequence[bytes]:
    """Return the parts joined into one, so that they are sent together. If the last part is large, the parts
    are returned unchanged, to avoid a copy."""
    if len(parts) == 1 or len(parts[-1]) > JOINED_BYTES:
        return parts
    return (b"".join(parts),)
