"""The output of runs. Asks agents for new lines of the logs that clients read, and stores the answers."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from gpubroker_server.core.domain.orders import Logged, LogName
from gpubroker_server.core.domain.units import NodeName, Seconds, Term
from gpubroker_server.core.lifecycle.run_logs import KnownLog, WantedLog, cut_between, is_kept, wanted_logs
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.executor import Executor
from gpubroker_server.ports.run_logs import LogChanges, LogPart, LogRows
from gpubroker_server.ports.store import BlobStore, BlobTooLarge, Clock, ReadTicks, StoreUnavailable

READ_SECONDS = Seconds(0.2)
"""The time between two questions to an agent for the new part of a log."""
LOOK_SECONDS = Seconds(0.4)
"""The time between two checks whether a client reads any log, while none does."""
AGAIN_SECONDS = Seconds(2.0)
"""The time after which a question without an answer is repeated."""


@dataclass(eq=False)
class LogKeeper:
    """Keeps the logs of runs during one term."""

    term: Term
    world: World
    store: LogRows
    blobs: BlobStore
    executor: Executor
    clock: Clock
    ticks: ReadTicks
    limit_bytes: int
    """The most bytes that are kept of each stream."""
    inline_bytes: int
    """The size in bytes above which the output of an ended run is stored as a blob."""

    def __post_init__(self) -> None:
        self._wanted: Mapping[LogName, WantedLog] = {}
        self._known: dict[LogName, KnownLog] = {}
        """The stored end of each wanted log."""
        self._asked: dict[LogName, float] = {}
        """The time when an agent was asked for a log that it has not sent yet."""

    async def follow(self) -> None:
        """Ask nodes at intervals for the logs that clients read, until cancelled."""
        while True:
            await asyncio.sleep(READ_SECONDS if self._wanted else LOOK_SECONDS)
            try:
                await self.ask_nodes()
            except StoreUnavailable:
                continue  # readers wait

    async def ask_nodes(self) -> None:
        """Ask each node for those of its logs that clients read now. Raises StoreUnavailable."""
        self._wanted = wanted_logs(self.world, await self.store.followed_logs(), self.clock.now())
        for log in self._known.keys() - self._wanted.keys():
            del self._known[log]
        asked_before = self.ticks() - AGAIN_SECONDS
        self._asked = {
            log: asked_at
            for log, asked_at in self._asked.items()
            if log in self._wanted and asked_at > asked_before
        }
        asked: dict[NodeName, dict[LogName, int]] = defaultdict(dict)
        for log in self._wanted.keys() - self._asked.keys():
            if log not in self._known:
                self._known[log] = KnownLog(*await self.store.log_end(log))
            asked[self._wanted[log].node][log] = self._known[log].end_byte
            self._asked[log] = self.ticks()
        for node, logs in asked.items():
            self.executor.read_logs(node, logs)

    async def keep(self, logs: Sequence[Logged]) -> None:
        """Store parts of logs, and return once they are durable. Raises StoreUnavailable and StaleTerm."""
        known = dict(self._known)
        replaced: set[LogName] = set()
        cut: dict[LogName, tuple[int, int]] = {}
        kept: list[tuple[Logged, str]] = []
        """The logs to keep, each with its tenant."""
        for logged in logs:
            task = self.world.tasks.get(logged.task)
            if task is None or not is_kept(
                logged, known.get(logged.log, KnownLog()), self._wanted.get(logged.log)
            ):
                continue
            if logged.is_final and logged.first_byte == 0:
                replaced.add(logged.log)
                kept = [(part, tenant) for part, tenant in kept if part.log != logged.log]
            known[logged.log] = KnownLog(logged.end_byte, logged.at)
            kept.append((logged, task.tenant))
            if not logged.is_final and (between := cut_between(logged, self.limit_bytes)):
                cut[logged.log] = between
        if kept:
            parts = await asyncio.gather(*(self._part_of(*log) for log in kept))
            await self.store.keep_logs(self.term, LogChanges(replaced, cut, parts))
        for logged in logs:
            self._asked.pop(logged.log, None)
        self._known = {log: state for log, state in known.items() if log in self._wanted}

    async def _part_of(self, logged: Logged, tenant: str) -> LogPart:
        part = LogPart(logged.log, logged.first_byte, len(logged.data), logged.at, tenant, logged.data)
        # While a run goes on, its parts stay in rows, which are deleted when the middle of a long log is cut.
        if not logged.is_final or len(logged.data) <= self.inline_bytes:
            return part
        try:
            return replace(part, data=None, digest=await self.blobs.put(logged.data, owner=logged.task))
        except (BlobTooLarge, StoreUnavailable):
            return part  # the leader must not wait for the disk of the objects because of a log
