"""The policies, and the replay of a trace against one of them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from bench.evict.planner import Planner
from bench.evict.trace import Use

LEAST_RECENT, OURS, BEST = "lru", "gpubroker", "clairvoyant"
POLICIES = ("fifo", LEAST_RECENT, "lfu", "decayed_lfu", OURS, BEST)

HALF_LIFE_SECONDS = 1800.0
"""The half-life of the decayed LFU: about the best single one for that trace, from a minute to three days."""


class Policy(Protocol):
    """Chooses the model to evict. Requests are numbered from 0."""

    def loaded(self, model: str, number: int, /) -> None:
        """Note that the model was loaded for this request; `used` follows."""

    def used(self, use: Use, number: int, /) -> None: ...

    def victim(self, resident: Collection[str], now: float, /) -> str: ...


def misses(uses: Sequence[Use], slots: int, policy: Policy) -> list[int]:
    """Return the numbers of the requests whose model had to be loaded, with room for `slots` models.

    Requests are served one at a time; a missing model takes a free slot or that of a victim.
    """
    resident: set[str] = set()
    missed: list[int] = []
    for number, use in enumerate(uses):
        if use.model not in resident:
            missed.append(number)
            if len(resident) == slots:
                resident.remove(policy.victim(resident, use.at))
            resident.add(use.model)
            policy.loaded(use.model, number)
        policy.used(use, number)
    return missed


def policy(name: str, uses: Sequence[Use], load_seconds: Mapping[str, float]) -> Policy:
    """Return the policy of this name. `uses` are all requests of the replay; only the clairvoyant policy
    reads them in advance."""
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
            return Planner(load_seconds)
        case _:
            return Clairvoyant(uses)


class Ranked:
    """Evicts the model with the lowest rank."""

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
    """Evicts the model whose next use is farthest away (Belady): no policy misses fewer requests."""

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
    """Evicts the least frequently used model; among equally frequent ones, the least recently used. With a
    half-life, a use counts half as much after each such time."""

    def __init__(self, half_life_seconds: float | None = None) -> None:
        self._half_life = half_life_seconds
        self._counts: dict[str, tuple[float, float, int]] = {}
        """Model -> (count, time of that count, number of its last request)."""

    def loaded(self, _model: str, _number: int) -> None:
        pass

    def used(self, use: Use, number: int) -> None:
        self._counts[use.model] = self._count(use.model, use.at) + 1, use.at, number

    def victim(self, resident: Collection[str], now: float) -> str:
        return min(resident, key=lambda model: (self._count(model, now), self._counts[model][2]))

    def _count(self, model: str, now: float) -> float:
        count, at, _ = self._counts.get(model, (0.0, now, 0))
        return count if self._half_life is None else count * 0.5 ** ((now - at) / self._half_life)
