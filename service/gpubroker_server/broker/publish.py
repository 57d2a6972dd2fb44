"""Lets other processes see what is no event: samples of devices, how far runs are, how the executor is."""

import asyncio
from collections.abc import Callable, Mapping

from gpubroker_server.core.domain.device import DeviceSample
from gpubroker_server.core.domain.units import DeviceKey, Seconds, TaskId, Term
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.last_values import LastValues, LastValueStore, LeaderSeen
from gpubroker_server.ports.store import Progress, StoreUnavailable


class Publisher:
    """Says what has changed since it last spoke, and that the leader is there."""

    def __init__(
        self,
        world: World,
        progress: Mapping[TaskId, Progress],
        leader: Callable[[Term], LeaderSeen],
        store: LastValueStore,
    ) -> None:
        """`leader`: what this process says of itself while it leads this term."""
        self._world = world
        self._progress = progress
        self._leader = leader
        self._store = store
        self._term = Term(0)
        self._number = 0
        """Of the words that were heard in this term."""
        self._samples: dict[DeviceKey, DeviceSample] = {}
        self._runs: dict[TaskId, Progress] = {}
        """What was last said."""

    async def keep(self, term: Callable[[], Term | None], every_seconds: Seconds) -> None:
        """Speak again and again while there is a term, until cancelled."""
        while True:
            await asyncio.sleep(every_seconds)
            if (leading := term()) is not None:
                await self.publish(leading)

    async def publish(self, term: Term) -> None:
        """What cannot be written now is said the next time."""
        if term != self._term:
            self._term, self._number = term, 0
            self._samples, self._runs = {}, {}
        samples = {key: book.sample for key, book in self._world.books.items() if book.sample is not None}
        runs = dict(self._progress)
        values = LastValues(
            samples=[sample for key, sample in samples.items() if sample is not self._samples.get(key)],
            progress={task: said for task, said in runs.items() if said is not self._runs.get(task)},
            leader=self._leader(term),
            ended=[task for task in self._runs if task not in runs],
        )
        try:
            await self._store.say(term, self._number + 1, values)
        except StoreUnavailable:
            return
        self._number += 1
        self._samples, self._runs = samples, runs
