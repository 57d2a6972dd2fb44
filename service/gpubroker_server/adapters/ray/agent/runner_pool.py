"""Runner processes made ahead: blank spares for one run each, and warm ones that small runs share."""

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import structlog
from gpubroker.runtime.messages import Report

from gpubroker_server.adapters.ray.agent.handshake import describe
from gpubroker_server.adapters.ray.agent.runner_process import Lane
from gpubroker_server.adapters.ray.agent.runners import Runners
from gpubroker_server.adapters.ray.options import AgentConfig
from gpubroker_server.adapters.ray.processes import ProcessId, process_id

log = structlog.get_logger("gpubroker.agent")

MAKING_AT_ONCE = 2
REFILL_PAUSE_SECONDS = 0.2
"""A process start takes a CPU for a moment; the run that has just begun comes first."""
RETRY_PAUSE_SECONDS = 1.0
BIRTH_SECONDS = 60.0
"""A process that has not answered by then never will: it makes room for the next try."""


class Audience(Protocol):
    """Who hears of the pool's lanes."""

    def on_report(self, lane: Lane, report: Report) -> None: ...

    def on_end(self, lane: Lane) -> None: ...

    def on_ready(self) -> None: ...


class Pool:
    def __init__(
        self, config: AgentConfig, runners: Runners, audience: Audience, waiting_starts: Callable[[], int]
    ) -> None:
        self._config = config
        self._runners = runners
        self._audience = audience
        self._waiting_starts = waiting_starts
        self._spares: deque[Lane] = deque()
        self._shared: list[Lane] = []
        self._making: dict[asyncio.Task[None], bool] = {}
        """Running makers -> whether they make a shared one."""
        self._refill: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def ready(self) -> list[Lane]:
        return [*self._spares, *self._shared]

    def take_spare(self) -> Lane | None:
        """A blank process, never handed out again."""
        lane = None
        while self._spares and (lane is None or lane.watched.ended):
            lane = self._spares.popleft()
        self.keep_full()
        return lane if lane is not None and not lane.watched.ended else None

    def give_back(self, lane: Lane) -> None:
        """A spare that was taken and has heard of no run."""
        self._spares.appendleft(lane)

    def least_busy_shared(self) -> Lane | None:
        lanes = [lane for lane in self._shared if not lane.retiring]
        return min(lanes, key=lambda lane: len(lane.runs), default=None)

    def retire_shared(self) -> None:
        """Let fresh processes take over, which import modules as they are on disk now."""
        for lane in list(self._shared):
            lane.retiring = True
            self.dismiss_if_done(lane)
        self.keep_full()

    def dismiss_if_done(self, lane: Lane) -> None:
        if lane.retiring and not lane.runs:
            lane.watched.signal(signal.SIGKILL)

    def forget(self, lane: Lane) -> None:
        """It ended; make another if it was one of those kept ready."""
        if lane in self._shared:
            self._shared.remove(lane)
        if lane in self._spares:
            self._spares.remove(lane)
        self.keep_full()

    def keep_full(self) -> None:
        """Make what is missing: at once if the next run would have to wait for it, else after a pause."""
        if self._refill is not None:
            self._refill.cancel()
        pause = REFILL_PAUSE_SECONDS if self._spares else 0.0
        self._refill = asyncio.get_running_loop().call_later(pause, self._make_missing)

    def adopt(
        self, name: str, actor: Any, process: ProcessId, *, shared: bool, protocol: int | None = None
    ) -> Lane:
        """Take over a runner that an earlier agent made. Raises ProcessLookupError if it is gone.

        It finishes its runs and gets no new ones: the user and the paths it was made with may be others now.
        """
        lane = self._lane(name, actor, process, shared=shared, protocol=protocol)
        lane.retiring = True
        if shared:
            self._shared.append(lane)
        return lane

    async def close(self) -> None:
        """Kill all that are ready, and those that are being made when they are."""
        self._closed = True
        for lane in self.ready:
            lane.watched.signal(signal.SIGKILL)
        await asyncio.gather(*self._making, return_exceptions=True)

    def _make_missing(self) -> None:
        if self._closed:
            return
        for shared in self._missing():
            if len(self._making) >= MAKING_AT_ONCE:
                return
            maker = asyncio.create_task(self._make(shared))
            self._making[maker] = shared
            maker.add_done_callback(self._made)

    def _missing(self) -> Iterator[bool]:
        """One entry per process that is missing: whether it shall be shared. Shared ones come first."""
        making_shared = sum(self._making.values())
        warm = sum(not lane.retiring for lane in self._shared)
        yield from [True] * (self._config.warm_runners - warm - making_shared)
        spare_making = len(self._making) - making_shared
        wanted = self._config.spares + self._waiting_starts()
        yield from [False] * (wanted - len(self._spares) - spare_making)

    def _made(self, maker: "asyncio.Task[None]") -> None:
        del self._making[maker]
        self._make_missing()

    async def _make(self, shared: bool) -> None:
        try:
            self._take_in(await self._made_lane(shared))
        except Exception as fault:
            log.warning("cannot start a runner process; trying again", fault=repr(fault))
            await asyncio.sleep(RETRY_PAUSE_SECONDS)

    async def _made_lane(self, shared: bool) -> Lane:
        name, actor = await asyncio.to_thread(self._runners.make, shared=shared)
        try:
            told = await describe(actor, BIRTH_SECONDS)
            process = process_id(told["pid"])
            return self._lane(name, actor, process, shared=shared, protocol=told["protocol"])
        except Exception:
            await asyncio.to_thread(self._runners.kill, actor)
            raise

    def _take_in(self, lane: Lane) -> None:
        if self._closed:
            lane.watched.signal(signal.SIGKILL)
            return
        if lane.shared:
            self._shared.append(lane)
        else:
            self._spares.append(lane)
        self._audience.on_ready()

    def _lane(self, name: str, actor: Any, process: ProcessId, *, shared: bool, protocol: int | None) -> Lane:
        on_report, on_end = self._audience.on_report, self._audience.on_end
        return Lane(
            name, actor, process, shared=shared, protocol=protocol, on_report=on_report, on_end=on_end
        )
