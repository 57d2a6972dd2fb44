"""A gateway's share of the slots of models. The gateway writes a claim on the slots that the leader gives it
to the database, and then uses them."""

import asyncio
from collections.abc import Callable, Mapping
from math import inf
from typing import Final

from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.serving.slots import FRESH_SECONDS, HOLD_SECONDS, Claim
from gpubroker_server.inference.lanes import Lanes
from gpubroker_server.ports.last_values import LeaderSeen, SlotStore
from gpubroker_server.ports.store import Clock, StoreUnavailable

EVERY_SECONDS: Final = Seconds(1.0)

_USABLE_SECONDS: Final = Seconds(HOLD_SECONDS - FRESH_SECONDS)
"""Time for which a written claim is used, by the clock of the lanes. The lanes check the time at each
request, so that a process that was asleep for longer notices that before it sends a request. The leader
counts a claim for HOLD_SECONDS, which is FRESH_SECONDS longer."""


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
        """`slots` maps a model to the number of its slots at all gateways together. `leader` returns the
        leader's newest message. Until the leader gives more slots, each model gets one request at a time."""
        self._name = name
        self._slots = slots
        self._lanes = lanes
        self._store = store
        self._clock = clock
        self._leader = leader
        for model in slots:
            lanes.limit(model, 1)

    async def keep(self) -> None:
        """Renew the claims until cancelled."""
        while True:
            await self.renew()
            await asyncio.sleep(EVERY_SECONDS)

    async def renew(self) -> None:
        """Renew the claims. So that no slot has two users, a smaller share is used at once, then the claim is
        written, and only then is a larger share used, unless the leader's message is stale by then."""
        # Both times are taken before the claim is written: the claim may end too early, but never too late.
        began, now, leader = self._lanes.now(), self._clock.now(), self._leader()
        if leader is not None and leader.slots is None:  # The leader's release does not divide slots.
            self._lanes.limits_end_at = inf
            for model, slots in self._slots.items():
                self._lanes.limit(model, slots)
            return
        shares = {} if leader is None or leader.at < now - FRESH_SECONDS else self._given_by(leader)
        holds: dict[str, int] = {}
        for model in self._slots:
            load = self._lanes.load(model)
            share = shares.get(model, load.slots)
            self._lanes.limit(model, min(share, load.slots))
            # Requests in flight go on, so their slots stay claimed although the share is smaller.
            holds[model] = max(share, load.in_flight)
        wants = {model: self._lanes.load(model).wanted for model in self._slots}
        if not await self._claim(Claim(self._name, now, holds, wants)):
            return
        self._lanes.limits_end_at = began + _USABLE_SECONDS
        if leader is not None and self._clock.now() <= leader.at + FRESH_SECONDS:
            for model, share in shares.items():
                self._lanes.limit(model, share)

    async def _claim(self, claim: Claim) -> bool:
        """Write the claim. Returns True if it was written before the previous one ended."""
        seconds_left = self._lanes.limits_end_at - self._lanes.now()
        try:
            async with asyncio.timeout(seconds_left if 0 < seconds_left < inf else None):
                await self._store.claim_slots(claim)
        except (TimeoutError, StoreUnavailable):
            return False
        return True

    async def drop(self) -> None:
        """Give up all claims, because this gateway is about to end. Raises StoreUnavailable."""
        await self._store.drop_slots(self._name)

    def _given_by(self, leader: LeaderSeen) -> dict[str, int]:
        shares = leader.slots or {}
        own_shares = {model: shares.get(model, {}).get(self._name) for model in self._slots}
        return {model: share for model, share in own_shares.items() if share is not None}
