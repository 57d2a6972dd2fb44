"""A gateway's part of the slots of models: what the leader gives it is written down, and then used."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from service.core.slot_shares import FRESH_SECONDS, HOLD_SECONDS, Claim
from service.core.units import Instant, Seconds
from service.gateway.inference.lanes import Lanes
from service.last_values import LeaderSeen, SlotStore
from service.ports import Clock, StoreUnavailable

EVERY_SECONDS: Final = Seconds(1.0)

_USABLE_SECONDS: Final = Seconds(HOLD_SECONDS - FRESH_SECONDS)
"""So long after a claim was written down it is relied upon."""


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
        self._claimed_at: Instant | None = None
        """None: it needs none, for one slot."""
        self._be_modest()

    async def keep(self) -> None:
        """Until cancelled."""
        while True:
            await self.turn()
            await asyncio.sleep(EVERY_SECONDS)

    async def turn(self) -> None:
        """Use less at once; claim; use more, unless the word that gave it is stale by then."""
        now, word = self._clock.now(), self._leader()
        if word is not None and word.slots is None:  # of a release that divides none
            for model, slots in self._slots.items():
                self._lanes.limit(model, slots)
            return
        if self._claimed_at is not None and now >= self._claimed_at + _USABLE_SECONDS:
            self._be_modest()
        given = {} if word is None or word.at < now - FRESH_SECONDS else self._given_by(word)
        holds: dict[str, int] = {}
        for model in self._slots:
            load = self._lanes.load(model)
            share = given.get(model, load.slots)
            self._lanes.limit(model, min(share, load.slots))
            holds[model] = max(share, load.in_flight)
        wants = {model: self._lanes.load(model).wanted for model in self._slots}
        if not await self._claim(Claim(self._name, now, holds, wants)) or word is None:
            return
        if self._clock.now() <= word.at + FRESH_SECONDS:
            for model, share in given.items():
                self._lanes.limit(model, share)

    async def _claim(self, claim: Claim) -> bool:
        """Whether it is written down, before the one before it ends."""
        left = None if self._claimed_at is None else self._claimed_at + _USABLE_SECONDS - claim.at
        try:
            async with asyncio.timeout(left):
                await self._store.claim_slots(claim)
        except TimeoutError:
            self._be_modest()
            return False
        except StoreUnavailable:
            return False
        self._claimed_at = claim.at
        return True

    async def drop(self) -> None:
        """This gateway is about to end. Raises StoreUnavailable."""
        await self._store.drop_slots(self._name)

    def _given_by(self, word: LeaderSeen) -> dict[str, int]:
        shares = word.slots or {}
        given = {model: shares.get(model, {}).get(self._name) for model in self._slots}
        return {model: share for model, share in given.items() if share is not None}

    def _be_modest(self) -> None:
        """No claim of more than this holds any longer."""
        self._claimed_at = None
        for model in self._slots:
            self._lanes.limit(model, 1)
