"""Models as holders of GPU memory: their terms, their use, and what evicting one is expected to cost.

The cost of evicting a model is the time to load it again, times the probability that it is needed. A use
counts less the older it is. One half-life would either forget a model that is used once a day, or take a day
to notice that its use has stopped; so the rates of four half-lives are added up. A model that was used just
now ranks high for minutes, and one that is used daily ranks high for days.
"""

from collections.abc import Collection
from math import ceil, exp, log
from typing import Annotated, NamedTuple

from gpubroker.wire.bounds import Priority
from msgspec import Meta, Struct

from gpubroker_server.core.domain.setting_marks import NonNegativeMib, NonNegativeSeconds
from gpubroker_server.core.domain.units import MIB_BYTES, Instant, Mib, Seconds

HALF_LIVES_SECONDS = (60.0, 900.0, 14_400.0, 216_000.0)
"""The half-lives are 1 min, 15 min, 4 h and 60 h. Each is about fifteen times the one before."""

WEIGHTS = (1, 2, 3, 5)
"""The weights of the rates at these half-lives. A rate counted over a longer time depends less on chance."""

HORIZON_SECONDS = Seconds(600.0)
"""A use within this time after an eviction counts as a loss."""

LOAD_TIME_FACTOR = 2.0
"""A model stays for at least this many times its load time: models that do not fit together then spend at
most a third of the time on loading."""

TURN_SECONDS = Seconds(10.0)
TURN_LOAD_TIMES = 4.0
"""A model with constant requests leaves for one of equal priority after the longer of ten seconds and four
times its load time. So at most a fifth of the time goes into loading."""

_PER_SECOND = tuple(
    weight / sum(WEIGHTS) * log(2) / half_life
    for weight, half_life in zip(WEIGHTS, HALF_LIVES_SECONDS, strict=True)
)


class ModelRules(Struct, frozen=True):
    """The operator's rules for a model on a server whose models are in the ledger."""

    gpu_mb: NonNegativeMib | None = None
    priority: Priority | None = None
    load_seconds: NonNegativeSeconds = Seconds(0.0)
    gpus: Annotated[int, Meta(ge=1, le=64)] = 1
    """The number of GPUs on each of which the model takes `gpu_mb`."""


class ModelUsage(Struct, frozen=True):
    """The decayed counts of a model's uses: five numbers, however many uses there were."""

    at: Instant = Instant(0.0)
    """The time of the last use, for which `counts` hold."""
    counts: tuple[float, ...] = (0.0,) * len(HALF_LIVES_SECONDS)
    """The decayed counts of uses, in the order of HALF_LIVES_SECONDS."""

    def used(self, now: Instant) -> "ModelUsage":
        """Return this usage with one more use. A use right after another counts half: a user's repeated tries
        say less about tomorrow than uses in different hours."""
        decayed = self._decayed(now)
        use = 1 - 0.5 * self._decay(now, HALF_LIVES_SECONDS[0]) if any(self.counts) else 1.0
        return ModelUsage(max(now, self.at), tuple(count + use for count in decayed))

    def chance(self, now: Instant) -> float:
        """Return the probability of a use within HORIZON_SECONDS from now, if uses are independent."""
        per_second = sum(rate * count for rate, count in zip(_PER_SECOND, self._decayed(now), strict=True))
        return 1 - exp(-per_second * HORIZON_SECONDS)

    def _decayed(self, now: Instant) -> tuple[float, ...]:
        return tuple(
            count * self._decay(now, half_life)
            for count, half_life in zip(self.counts, HALF_LIVES_SECONDS, strict=True)
        )

    def _decay(self, now: Instant, half_life: float) -> float:
        """Return the share of a use at `self.at` that still counts now. It is at most 1, even if the clock
        was set back."""
        return float(0.5 ** (max(0.0, now - self.at) / half_life))


NEVER_USED = ModelUsage()


def min_residency_seconds(load_seconds: Seconds, least_seconds: Seconds) -> Seconds:
    """Return how long after its load a model is protected from preemption; 0 if `least_seconds` is 0."""
    return Seconds(max(least_seconds, LOAD_TIME_FACTOR * load_seconds)) if least_seconds else Seconds(0.0)


def turn_seconds(load_seconds: Seconds) -> Seconds:
    """Return how long after its load a model with constant requests keeps its memory from models of equal
    priority."""
    return Seconds(max(TURN_SECONDS, TURN_LOAD_TIMES * load_seconds))


def expected_seconds(load_seconds: Seconds, usage: ModelUsage, now: Instant) -> Seconds:
    """Return the seconds of loading that evicting the model now is expected to cost."""
    return Seconds(load_seconds * usage.chance(now))


class ModelKey(NamedTuple):
    """A model on a server, of which there is one holder at a time. An empty `model` is the server itself,
    with its base cost."""

    server: str
    model: str


MAX_GPUS_NAMED = 8


def gpus_fault(server: str, seen: Collection[str], gpus: int) -> str:
    """Return the reason why a model with leases on `gpus` GPUs cannot be loaded by a server that sees the
    GPUs in `seen`; empty if it can.

    Triton loads a model on each GPU that it sees. A model's configuration may name some of them, but by
    numbers that only the server knows, and not every backend respects the names. So the leases have to cover
    all GPUs.
    """
    if gpus in (0, len(seen)) or not seen:
        return ""
    named = sorted(seen)[:MAX_GPUS_NAMED]
    more = f" and {len(seen) - len(named)} more" if len(seen) > len(named) else ""
    gpus_seen = f"server {server} sees {len(seen)} GPU{'s' * (len(seen) > 1)} ({', '.join(named)}{more})"
    if gpus > len(seen):
        return f"{gpus_seen}, and the model's settings say gpus: {gpus}; lower that, or give the server more"
    return (
        f"{gpus_seen}, and Triton loads a model on each of them, but its lease would be on {gpus}: start one "
        f"server for each GPU, with its UUID in CUDA_VISIBLE_DEVICES and in devices of its settings; for a "
        f"model that is spread over all of them set its gpus: {len(seen)}"
    )


FILE_FACTOR = 1.25
"""The estimated memory of a model per byte of its files. Memory needs more because weights are laid out
differently there, and because requests need working memory."""


def first_guess_mb(file_bytes: int | None, least_mb: Mib) -> Mib:
    """Return an estimate of a model's size by the size of its files, but at least `least_mb`. Without a known
    file size it is `least_mb`."""
    if file_bytes is None:
        return least_mb
    return max(least_mb, Mib(ceil(FILE_FACTOR * file_bytes / MIB_BYTES)))
