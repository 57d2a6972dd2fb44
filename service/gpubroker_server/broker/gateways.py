"""The gateways that are there, as the leader knows of them: each lets go of a model before it is unloaded."""

from gpubroker_server.ports.last_values import PRESENT_SECONDS, PresenceStore
from gpubroker_server.ports.store import Clock, StoreUnavailable


class Gateways:
    def __init__(self, store: PresenceStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def have_let_go(self, claim: str) -> bool:
        """All of them, but for those that have said nothing for so long that they are gone, or cut off."""
        try:
            presences = await self._store.presences()
        except StoreUnavailable:
            return False
        since = self._clock.now() - PRESENT_SECONDS
        return all(claim in presence.let_go for presence in presences if presence.at >= since)
