"""What is known of runs from those that ended: quantiles of a size or a duration, kept in a few numbers.

The sketch is DDSketch (Masson, Rim, Lee: "DDSketch: a fast and fully-mergeable quantile sketch with
relative-error guarantees", VLDB 2019): counts in buckets whose bounds grow by a constant factor.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, log

RELATIVE_ERROR = 0.02
"""No quantile is further from the value that it stands for than this share of it."""

MOST_COUNTED = 1000
"""Above so many values all counts are halved: what runs did lately counts more than what they did once."""

_GROWTH = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GROWTH = log(_GROWTH)
_SMALLEST = 1e-3
"""Values below it, zero and negative ones too, count as this much."""


@dataclass(frozen=True, slots=True)
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
        bucket = ceil(log(max(value, _SMALLEST)) / _LOG_GROWTH)
        counts = dict(self.counts)
        counts[bucket] = counts.get(bucket, 0) + 1
        if self.n >= MOST_COUNTED:
            counts = {at: count // 2 for at, count in counts.items()}
        return Sketch(tuple(sorted((at, count) for at, count in counts.items() if count)))

    def quantile(self, share: float) -> float | None:
        """The value below or at which this share (0 to 1) of all lies; None as long as there is none."""
        wanted = share * (self.n - 1)
        below = 0
        for bucket, count in self.counts:
            below += count
            if below > wanted:
                return 2 * _GROWTH**bucket / (_GROWTH + 1)
        return None


def sketch_of(values: Iterable[float]) -> Sketch:
    sketch = Sketch()
    for value in values:
        sketch = sketch.add(value)
    return sketch
