"""The terms on which somebody who runs outside of the broker holds memory."""

from dataclasses import dataclass

from gpubroker_server.core.domain.units import Seconds

KIND = "external"
"""What stands where others have the kind of their run."""


@dataclass(frozen=True, slots=True)
class External:
    """A holder that nobody starts or stops: it asks, renews and gives back by itself."""

    ttl_seconds: Seconds
    """So long after its admission, and after each renewal, it is to leave if it was not heard of again."""
    pid: int | None = None
    """A process on the node of its lease, with its children: what they use is the holder's, and once that
    process is gone the holder is."""
