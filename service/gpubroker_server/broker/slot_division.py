"""The leader divides slots of models among gateways, once a second, by what they claim and want."""

import asyncio
from collections.abc import Callable, Mapping

from gpubroker_server.core.domain.units import Seconds, Term
from gpubroker_server.core.serving.slots import AWAY_SECONDS, HOLD_SECONDS, Shares, SlotShares
from gpubroker_server.ports.last_values import SlotStore
from gpubroker_server.ports.store import Clock, StoreUnavailable


class SlotDesk:
    def __init__(self, slots: Mapping[str, int], store: SlotStore, clock: Clock) -> None:
        """`slots`: by model, of all gateways together."""
        self._slots = slots
        self._store = store
        self._clock = clock
        self._term: Term | None = None
        self._shares: SlotShares | None = None
        self.told: Mapping[str, Shares] = {}
        """Its newest word."""

    @property
    def word(self) -> Mapping[str, Shares] | None:
        """As the leader says it; None where there is nothing to divide."""
        return self.told if self._slots else None

    async def keep(self, term: Callable[[], Term | None], every_seconds: Seconds) -> None:
        """While there is a term, until cancelled."""
        while True:
            await asyncio.sleep(every_seconds)
            await self.divide(term())

    async def divide(self, term: Term | None) -> None:
        if term is None or term != self._term:
            self._term, self.told = term, {}
            self._shares = None if term is None else SlotShares(self._slots, self._clock.now())
        if self._shares is None:
            return
        try:
            claims = await self._store.slot_claims()
            now = self._clock.now()
            self.told = self._shares.give(claims, now)
            for claim in claims:
                if claim.at <= now - HOLD_SECONDS - AWAY_SECONDS:
                    await self._store.drop_slots(claim.gateway)
        except StoreUnavailable:
            return
