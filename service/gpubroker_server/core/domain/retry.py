"""When a failed task may be tried again."""

from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Instant, Seconds

_LARGEST_EXPONENT = 32
"""Far beyond every cap; keeps the power within a float."""


def retry_delay_seconds(failures: int, policy: Policy) -> Seconds:
    """`retry_first_seconds` after the first failure, then `retry_factor` times longer each, up to the cap."""
    exponent = min(failures - 1, _LARGEST_EXPONENT)
    return Seconds(min(policy.retry_cap_seconds, policy.retry_first_seconds * policy.retry_factor**exponent))


def next_retry_at(failures: int, now: Instant, policy: Policy) -> Instant:
    """`failures` counts the attempts that used up a retry, the one that just failed included."""
    return Instant(now + retry_delay_seconds(failures, policy))
