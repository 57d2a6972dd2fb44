"""Quantiles of run sizes and durations, learned from runs that ended.

The sketch is DDSketch (Masson, Rim, Lee: "DDSketch: a fast and fully-mergeable quantile sketch with
relative-error guarantees", VLDB 2019): counts in buckets with bounds that grow by a constant factor.
"""

from bisect import bisect_left
from enum import StrEnum
from math import ceil, log

from msgspec import Struct

from gpubroker_server.core.domain.units import Instant

RELATIVE_ERROR = 0.02
"""The largest relative error of a quantile."""

MAX_COUNTED = 1000
"""The number of values at which all counts are halved, so that recent runs count more than old ones."""

_GROWTH = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GROWTH = log(_GROWTH)
_SMALLEST = 1e-3
"""The smallest value that is told apart. Smaller values, zero and negatives included, count as this one."""


class Sketch(Struct, frozen=True):
    counts: tuple[tuple[int, int], ...] = ()
    """(bucket, count), ordered by bucket. Counts are above 0. Bucket i holds values up to _GROWTH**i."""

    @property
    def n(self) -> int:
        """The number of values that the sketch holds. Values that were forgotten by halving do not count."""
        return sum(count for _, count in self.counts)

    def add(self, value: float) -> "Sketch":
        counts, bucket = self.counts, bucket_of(value)
        index = bisect_left(counts, (bucket,))
        rest, count = index, 1
        if index < len(counts) and counts[index][0] == bucket:
            rest, count = index + 1, counts[index][1] + 1
        more = (*counts[:index], (bucket, count), *counts[rest:])
        if self.n >= MAX_COUNTED:
            more = tuple((bucket, count // 2) for bucket, count in more if count > 1)
        return Sketch(more)

    def above(self, value: float) -> "Sketch":
        """Return a sketch of the values above this value, to within RELATIVE_ERROR."""
        bucket = bucket_of(value)
        return Sketch(tuple(pair for pair in self.counts if pair[0] > bucket))

    def share_until(self, value: float) -> float | None:
        """Return the share (0 to 1) of values up to this value, to within RELATIVE_ERROR; None if the sketch
        is empty."""
        return 1 - self.above(value).n / self.n if self.counts else None

    def quantile(self, share: float) -> float | None:
        """Return the value at or below which this share (0 to 1) of all values lies; None if the sketch is
        empty."""
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
    GPU_MB = "gpu_mb"
    """The peak memory of a run on one device."""
    SECONDS = "seconds"
    START_ERROR = "start_error_seconds"
    """The absolute difference between a task's first start forecast and its admission, in seconds."""
    START_SHARE = "start_share"
    """A task's wait since its first forecast, divided by the forecast's 90 % bound: at most 1 if the bound
    held."""


class SketchKey(Struct, frozen=True):
    tenant: str
    subject: str
    """The name in `Task.subject`. Runs of one subject are taken to be alike."""
    kind: str
    """The kind of the runs' devices; empty for runs without a device."""
    what: What


class Observation(Struct, frozen=True):
    """A value that the end of a run adds to a sketch."""

    topic: SketchKey
    value: float
    sketch: Sketch
    """The sketch of the topic, with this value added. It becomes the row of the topic."""
    at: Instant
