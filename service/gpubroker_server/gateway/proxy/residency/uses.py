"""How often models were used since the leader last heard of it."""

from typing import NamedTuple

from gpubroker_server.core.domain.units import Instant


class Uses(NamedTuple):
    times: int
    priority: int
    """The highest."""
    last_at: Instant


class UseCounts:
    def __init__(self) -> None:
        self._by_model: dict[str, Uses] = {}

    def models(self) -> list[str]:
        return list(self._by_model)

    def add(self, model: str, uses: Uses) -> None:
        known = self._by_model.get(model, uses._replace(times=0))
        self._by_model[model] = Uses(
            known.times + uses.times,
            max(known.priority, uses.priority),
            max(known.last_at, uses.last_at),
        )

    def take(self, model: str) -> Uses | None:
        return self._by_model.pop(model, None)
