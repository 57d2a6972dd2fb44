"""Models as holders of GPU memory: their terms, their use, and what evicting one is expected to cost.

The cost is the time to load it again, times the probability that it is needed. Each use counts less the older
it is. One half-life would either forget what is used once a day or take a day to notice that use has stopped;
the rates of four half-lives are added up instead. A model used just now ranks high for minutes, one used
daily ranks high for days.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil, exp, log
from typing import NamedTuple

from gpubroker_server.core.domain.units import Instant, Mib, Seconds

HALF_LIVES_SECONDS = (60.0, 900.0, 14_400.0, 216_000.0)
"""1 min, 15 min, 4 h, 60 h: each about fifteen times the one before."""

WEIGHTS = (1, 2, 3, 5)
"""Of the rates at these half-lives. A rate counted over a longer time depends less on chance."""

HORIZON_SECONDS = Seconds(600.0)
"""A use within this time after an eviction counts as a loss."""

LOAD_TIME_FACTOR = 2.0
"""A model stays for at least this many times its load time: models that do not fit together then spend at
most a third of the time on loading."""

TURN_SECONDS = Seconds(10.0)
TURN_LOAD_TIMES = 4.0
"""A model that is asked all the time leaves for an equal after the longer of ten seconds and four times its
load time: at most a fifth of the time goes into loading."""

_PER_SECOND = tuple(
    weight / sum(WEIGHTS) * log(2) / half_life
    for weight, half_life in zip(WEIGHTS, HALF_LIVES_SECONDS, strict=True)
)


@dataclass(frozen=True, slots=True)
class ModelUsage:
    """How often a model was used: five numbers, however many uses there were."""

    at: Instant = Instant(0.0)
    """The time of the last use, for which `counts` hold."""
    counts: tuple[float, ...] = (0.0,) * len(HALF_LIVES_SECONDS)
    """The uses, decayed; in the order of HALF_LIVES_SECONDS."""

    def used(self, now: Instant) -> "ModelUsage":
        """This usage with one more use. A use right after another counts half: a user's repeated tries say
        less about tomorrow than uses in different hours."""
        decayed = self._decayed(now)
        use = 1 - 0.5 * self._decay(now, HALF_LIVES_SECONDS[0]) if any(self.counts) else 1.0
        return ModelUsage(max(now, self.at), tuple(count + use for count in decayed))

    def chance(self, now: Instant) -> float:
        """The probability of a use within the horizon from now, if uses are independent."""
        per_second = sum(rate * count for rate, count in zip(_PER_SECOND, self._decayed(now), strict=True))
        return 1 - exp(-per_second * HORIZON_SECONDS)

    def _decayed(self, now: Instant) -> tuple[float, ...]:
        return tuple(
            count * self._decay(now, half_life)
            for count, half_life in zip(self.counts, HALF_LIVES_SECONDS, strict=True)
        )

    def _decay(self, now: Instant, half_life: float) -> float:
        """The share of a use at `self.at` that is left now; at most 1, also if the clock was set back."""
        return float(0.5 ** (max(0.0, now - self.at) / half_life))


NEVER_USED = ModelUsage()


def min_residency_seconds(load_seconds: Seconds, least_seconds: Seconds) -> Seconds:
    """How long after its load a model is protected from preemption; not at all if `least_seconds` is 0."""
    return Seconds(max(least_seconds, LOAD_TIME_FACTOR * load_seconds)) if least_seconds else Seconds(0.0)


def turn_seconds(load_seconds: Seconds) -> Seconds:
    """How long after its load a model that is asked all the time keeps its memory from its equals."""
    return Seconds(max(TURN_SECONDS, TURN_LOAD_TIMES * load_seconds))


def expected_seconds(load_seconds: Seconds, usage: ModelUsage, now: Instant) -> Seconds:
    """Seconds of loading that evicting the model now is expected to cost."""
    return Seconds(load_seconds * usage.chance(now))


class ModelKey(NamedTuple):
    """A model on a server; one holder at a time. An empty model is the server itself, with its base cost."""

    server: str
    model: str


@dataclass(frozen=True, slots=True)
class ModelTerms:
    """A model that is wanted or loaded. Its server loads and unloads it; node agents do not know it."""

    server: str
    model: str
    wanted_seconds: Seconds = Seconds(300.0)
    """How long it stays wanted after each request. While wanted it waits for memory, and then stays with the
    priority of its requests."""
    asked_priority: int = 50
    asked_at: Instant = Instant(0.0)
    queued: bool = False
    """Queued inferences want it at that priority: the leader knows when they no longer do."""
    pinned: bool = False
    yields: bool = False
    """An equal that waits may have its memory: no request is under way or queued, or its turn is over."""
    left_at: Instant | None = None
    """When it last left for another holder: its place in the queue is behind those that waited then."""
    load_seconds: Seconds = Seconds(0.0)
    usage: ModelUsage = NEVER_USED
    steps: tuple[str, ...] = ()
    """Of an ensemble: the models loaded with it; its size includes theirs."""
    versions: tuple[str, ...] = ()
    """The versions loaded when it was last ready, sorted; empty if unknown."""
    measured: bool = False
    """It is loaded to be measured: what it takes until it leaves is its size, however late."""
    address: str = ""
    """Where its server is asked; empty if unknown. A server is known by this, or by its process: its name may
    change."""
    process: str = ""
    """The server's process, as its machine knows it; empty where that cannot be seen."""
    sized: bool = False
    """The operator said how large it is, or a load of it was measured. Otherwise it is loaded alone on its
    device, so that its size can be measured."""

    @property
    def home(self) -> ModelKey:
        return ModelKey(self.server, self.model)

    def is_at(self, server: str, address: str, process: str) -> bool:
        """Whether that is its server: the same process, or else the same address; by name if it has no
        address."""
        if self.process and self.process == process:
            return True
        return self.address == address if self.address and address else self.server == server


MOST_GPUS_NAMED = 8


def gpus_fault(server: str, seen: Collection[str], gpus: int) -> str:
    """Why a model with leases on so many GPUs cannot be on a server that sees these; empty if it can.

    Triton loads a model on each GPU that it sees. A configuration that names some does so by numbers that
    only the server knows, and not every backend keeps to them: so the lease has to be on all.
    """
    if gpus in (0, len(seen)) or not seen:
        return ""
    named = sorted(seen)[:MOST_GPUS_NAMED]
    more = f" and {len(seen) - len(named)} more" if len(seen) > len(named) else ""
    found = f"server {server} sees {len(seen)} GPU{'s' * (len(seen) > 1)} ({', '.join(named)}{more})"
    if gpus > len(seen):
        return f"{found}, and the model's settings say gpus: {gpus}; lower that, or give the server more"
    return (
        f"{found}, and Triton loads a model on each of them, but its lease would be on {gpus}: start one "
        f"server for each GPU, with its UUID in CUDA_VISIBLE_DEVICES and in devices of its settings; for a "
        f"model that is spread over all of them set its gpus: {len(seen)}"
    )


FILE_FACTOR = 1.25
"""Memory over file size: weights are laid out differently, and requests need working memory."""

MIB_BYTES = 2**20


def first_guess_mb(file_bytes: int | None, least_mb: Mib) -> Mib:
    """Estimate by file size if it is known, but at least `least_mb`."""
    if file_bytes is None:
        return least_mb
    return max(least_mb, Mib(ceil(FILE_FACTOR * file_bytes / MIB_BYTES)))
