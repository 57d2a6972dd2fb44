"""What is known of runs from those that ended: quantiles of a size or a duration, kept in a few numbers.

The sketch is DDSketch (Masson, Rim, Lee: "DDSketch: a fast and fully-mergeable quantile sketch with
relative-error guarantees", VLDB 2019): counts in buckets whose bounds grow by a constant factor.
"""

from bisect import bisect_left
from enum import StrEnum
from math import ceil, log

from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.domain.values import value

RELATIVE_ERROR = 0.02
"""No quantile is further from the value that it stands for than this share of it."""

MOST_COUNTED = 1000
"""Above so many values all counts are halved: what runs did lately counts more than what they did once."""

_GROWTH = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GROWTH = log(_GROWTH)
_SMALLEST = 1e-3
"""Values below it, zero and negative ones too, count as this much."""


@value
class Sketch:
    """A value. `add` makes the next one."""

    counts: tuple[tuple[int, int], ...] = ()
    """(bucket, how many), in bucket order, no empty ones. Bucket i holds values up to growth**i."""

    @property
    def n(self) -> int:
        """How many values it speaks for; forgotten ones do not count."""
        return sum(count for _, count in self.counts)

    def add(self, value: float) -> "Sketch":
        """With one more value, in whatever unit this sketch is kept."""
        counts, bucket = self.counts, bucket_of(value)
        at = bisect_left(counts, (bucket,))
        rest, count = at, 1
        if at < len(counts) and counts[at][0] == bucket:
            rest, count = at + 1, counts[at][1] + 1
        more = (*counts[:at], (bucket, count), *counts[rest:])
        if self.n >= MOST_COUNTED:
            more = tuple((bucket, count // 2) for bucket, count in more if count > 1)
        return Sketch(more)

    def above(self, value: float) -> "Sketch":
        """Of the values larger than this one only, as far as the error lets them be told apart."""
        bucket = bucket_of(value)
        return Sketch(tuple(pair for pair in self.counts if pair[0] > bucket))

    def share_until(self, value: float) -> float | None:
        """How large a share (0 to 1) of all is no more than this, as far as the error lets that be told; None
        as long as there is none."""
        return 1 - self.above(value).n / self.n if self.counts else None

    def quantile(self, share: float) -> float | None:
        """The value below or at which this share (0 to 1) of all lies; None as long as there is none."""
        wanted = max(1, ceil(share * self.n))
        below = 0
        for bucket, count in self.counts:
            below += count
            if below >= wanted:
                return 2 * _GROWTH**bucket / (_GROWTH + 1)
        return None


def bucket_of(value: float) -> int:
    return ceil(log(max(value, _SMALLEST)) / _LOG_GROWTH)


class What(StrEnum):
    """What is learned of runs, and the unit it is kept in."""

    GPU_MB = "gpu_mb"
    """The most memory that a run was measured to use of one device."""
    SECONDS = "seconds"
    """From the start of a run to its end."""
    START_ERROR = "start_error_seconds"
    """How far the first forecast of a task's start was from its admission, either way."""
    START_SHARE = "start_share"
    """How long a task waited from its first forecast on, as a share of what nine in ten were to wait at most:
    the forecast held if it is no more than 1."""


@value
class Topic:
    """What one sketch is about."""

    tenant: str
    subject: str
    """As `Task.subject`: the runs of one subject are taken to be alike."""
    kind: str
    """Of the devices that the runs had; empty for runs without one."""
    what: What


@value
class Lesson:
    """One value that the end of a run adds."""

    topic: Topic
    value: float
    sketch: Sketch
    """With this value and all that came before it; what the row of the topic becomes."""
    at: Instant
