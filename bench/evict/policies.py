"""Who goes when another model needs the slot."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from gpubroker_server.core.domain.models.residency import Resident, StayRules, Usage, least_worth_first
from gpubroker_server.core.domain.units import Instant, Seconds

from bench.evict.trace import Use

LEAST_RECENT, OURS, BEST = "lru", "gpubroker", "clairvoyant"
POLICIES = ("fifo", LEAST_RECENT, "lfu", "decayed_lfu", OURS, BEST)

HALF_LIFE_SECONDS = 1800.0
"""Of the decayed LFU: of single half-lives from a minute to three days about the best on that trace."""

NOBODY_IS_GUARDED = StayRules(Seconds(0.0), 0.0)
"""In a replay nobody can wait: what is asked for is loaded at once."""


class Policy(Protocol):
    """Requests are named by their numbers, counted from 0."""

    def loaded(self, model: str, number: int, /) -> None:
        """For this request, by which it is `used` then."""

    def used(self, use: Use, number: int, /) -> None: ...

    def victim(self, resident: Collection[str], now: float, /) -> str: ...


def policy(name: str, uses: Sequence[Use], load_seconds: Mapping[str, float]) -> Policy:
    """`uses`: all there will be, for whom it is given to know them."""
    match name:
        case "fifo":
            return Fifo()
        case "lru":
            return Lru()
        case "lfu":
            return Lfu()
        case "decayed_lfu":
            return Lfu(HALF_LIFE_SECONDS)
        case "gpubroker":
            return Gpubroker(load_seconds)
        case _:
            return Clairvoyant(uses)


class Ranked:
    """Who ranks lowest goes: each model has a number."""

    def __init__(self) -> None:
        self.rank: dict[str, float] = {}

    def loaded(self, _model: str, _number: int) -> None:
        pass

    def used(self, _use: Use, _number: int) -> None:
        pass

    def victim(self, resident: Collection[str], _now: float) -> str:
        return min(resident, key=lambda model: (self.rank[model], model))


class Fifo(Ranked):
    def loaded(self, model: str, number: int) -> None:
        self.rank[model] = number


class Lru(Ranked):
    def used(self, use: Use, number: int) -> None:
        self.rank[use.model] = number


class Clairvoyant(Ranked):
    """Who is used again last, after Belady: no policy misses fewer requests."""

    def __init__(self, uses: Sequence[Use]) -> None:
        super().__init__()
        self._next = [len(uses)] * len(uses)
        seen: dict[str, int] = {}
        for number in reversed(range(len(uses))):
            model = uses[number].model
            self._next[number] = seen.get(model, len(uses))
            seen[model] = number

    def used(self, use: Use, number: int) -> None:
        self.rank[use.model] = -self._next[number]


class Lfu:
    """Who was used least often, each use being worth half after each half-life, if there is one. Of equals
    who is unused for longest."""

    def __init__(self, half_life_seconds: float | None = None) -> None:
        self._half_life = half_life_seconds
        self._counts: dict[str, tuple[float, float, int]] = {}
        """By model its count, the moment that holds for, and its last request."""

    def loaded(self, _model: str, _number: int) -> None:
        pass

    def used(self, use: Use, number: int) -> None:
        self._counts[use.model] = self._count(use.model, use.at) + 1, use.at, number

    def victim(self, resident: Collection[str], now: float) -> str:
        return min(resident, key=lambda model: (self._count(model, now), self._counts[model][2]))

    def _count(self, model: str, now: float) -> float:
        count, at, _ = self._counts.get(model, (0.0, now, 0))
        return count if self._half_life is None else count * 0.5 ** ((now - at) / self._half_life)


class Gpubroker:
    """The service's own choice, among models that are all idle and of which nobody is guarded."""

    def __init__(self, load_seconds: Mapping[str, float]) -> None:
        self._load_seconds = load_seconds
        self._usage: dict[str, Usage] = {}

    def loaded(self, _model: str, _number: int) -> None:
        pass

    def used(self, use: Use, _number: int) -> None:
        self._usage[use.model] = self._usage.get(use.model, Usage()).used(Instant(use.at))

    def victim(self, resident: Collection[str], now: float) -> str:
        models = [Resident(name, Seconds(self._load_seconds[name]), self._usage[name]) for name in resident]
        return least_worth_first(models, NOBODY_IS_GUARDED, Instant(now))[0].name
