"""A gateway's part of the slots of models: what the leader gives it is written down, and then used."""

import asyncio
from collections.abc import Callable, Mapping
from math import inf
from typing import Final

from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.serving.slot_shares import FRESH_SECONDS, HOLD_SECONDS, Claim
from gpubroker_server.gateway.proxy.lanes import Lanes
from gpubroker_server.ports.last_values import LeaderSeen, SlotStore
from gpubroker_server.ports.store import Clock, StoreUnavailable

EVERY_SECONDS: Final = Seconds(1.0)

_USABLE_SECONDS: Final = Seconds(HOLD_SECONDS - FRESH_SECONDS)
"""So long after a claim was written down it is relied upon, by the clock of the lanes, which look at it each
time: whoever was asleep for longer knows it before he has a turn here."""


class SlotLeases:
    def __init__(
        self,
        name: str,
        slots: Mapping[str, int],
        lanes: Lanes,
        store: SlotStore,
        clock: Clock,
        leader: Callable[[], LeaderSeen | None],
    ) -> None:
        """`slots`: by model, of all gateways together. `leader`: its newest word that is heard here; until
        that gives more, each model is asked one request at a time."""
        self._name = name
        self._slots = slots
        self._lanes = lanes
        self._store = store
        self._clock = clock
        self._leader = leader
        for model in slots:
            lanes.limit(model, 1)

    async def keep(self) -> None:
        """Until cancelled."""
        while True:
            await self.turn()
            await asyncio.sleep(EVERY_SECONDS)

    async def turn(self) -> None:
        """Use less at once; claim; use more, unless the word that gave it is stale by then."""
        began, now, word = self._lanes.now(), self._clock.now(), self._leader()
        if word is not None and word.slots is None:  # of a release that divides none
            self._lanes.limits_end_at = inf
            for model, slots in self._slots.items():
                self._lanes.limit(model, slots)
            return
        given = {} if word is None or word.at < now - FRESH_SECONDS else self._given_by(word)
        holds: dict[str, int] = {}
        for model in self._slots:
            load = self._lanes.load(model)
            share = given.get(model, load.slots)
            self._lanes.limit(model, min(share, load.slots))
            holds[model] = max(share, load.in_flight)
        wants = {model: self._lanes.load(model).wanted for model in self._slots}
        if not await self._claim(Claim(self._name, now, holds, wants)):
            return
        self._lanes.limits_end_at = began + _USABLE_SECONDS
        if word is None:
            return
        if self._clock.now() <= word.at + FRESH_SECONDS:
            for model, share in given.items():
                self._lanes.limit(model, share)

    async def _claim(self, claim: Claim) -> bool:
        """Whether it is written down, before the one before it ends."""
        left = self._lanes.limits_end_at - self._lanes.now()
        try:
            async with asyncio.timeout(left if 0 < left < inf else None):
                await self._store.claim_slots(claim)
        except (TimeoutError, StoreUnavailable):
            return False
        return True

    async def drop(self) -> None:
        """This gateway is about to end. Raises StoreUnavailable."""
        await self._store.drop_slots(self._name)

    def _given_by(self, word: LeaderSeen) -> dict[str, int]:
        shares = word.slots or {}
        given = {model: shares.get(model, {}).get(self._name) for model in self._slots}
        return {model: share for model, share in given.items() if share is not None}
