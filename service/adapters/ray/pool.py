"""Runner processes made ahead: blank spares for one run each, and warm ones that small runs share."""

import asyncio
import logging
import signal
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from uuid import uuid4

import ray
from gpubroker.runtime.messages import PROTOCOL, Report
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from service.adapters.ray.lane import Lane
from service.adapters.ray.options import AgentConfig
from service.adapters.ray.processes import ProcessId, process_id
from service.adapters.ray.runner import Runner

log = logging.getLogger("gpubroker.agent")

MAKING_AT_ONCE = 2
REFILL_PAUSE_SECONDS = 0.2
"""A process start takes a CPU for a moment; the run that has just begun comes first."""
RETRY_PAUSE_SECONDS = 1.0
ANSWER_SECONDS = 10.0


class Audience(Protocol):
    """Who hears of the pool's lanes."""

    def on_report(self, lane: Lane, report: Report) -> None: ...

    def on_end(self, lane: Lane) -> None: ...

    def on_ready(self) -> None: ...


class Pool:
    def __init__(self, config: AgentConfig, audience: Audience, waiting_starts: Callable[[], int]) -> None:
        self._config = config
        self._audience = audience
        self._prefix = f"runner/{config.node}/"
        self._waiting_starts = waiting_starts
        self.ray_node: str = ray.get_runtime_context().get_node_id()
        self._spares: deque[Lane] = deque()
        self._shared: list[Lane] = []
        self._making: dict[asyncio.Task[None], bool] = {}
        """Running makers -> whether they make a shared one."""
        self._refill: asyncio.TimerHandle | None = None
        self._closed = False

    def take_spare(self) -> Lane | None:
        """A blank process, never handed out again."""
        lane = None
        while self._spares and (lane is None or lane.watched.ended):
            lane = self._spares.popleft()
        self.keep_full()
        return lane if lane is not None and not lane.watched.ended else None

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

    def left_over(self) -> list[str]:
        """Names of this node's runners that are alive in Ray. Blocks."""
        named = ray.util.list_named_actors(all_namespaces=True)
        ours = (actor["name"] for actor in named if actor["namespace"] == self._config.namespace)
        return [name for name in ours if name.startswith(self._prefix)]

    def adopt(self, name: str, actor: Any, process: ProcessId, *, shared: bool) -> Lane:
        """Take over a runner that an earlier agent made. Raises ProcessLookupError if it is gone."""
        lane = self._lane(name, actor, process, shared=shared)
        if shared:
            self._shared.append(lane)
        return lane

    def close(self) -> None:
        self._closed = True
        for maker in self._making:
            maker.cancel()
        for lane in (*self._spares, *self._shared):
            lane.watched.signal(signal.SIGKILL)

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
        name = f"{self._prefix}{uuid4().hex[:8]}"
        try:
            actor = await asyncio.to_thread(self._create, name, shared)
            told = await actor.describe.remote()
            lane = self._lane(name, actor, process_id(told["pid"]), shared=shared)
        except (RayError, ProcessLookupError, ValueError) as fault:
            log.warning("cannot start a runner process, trying again: %s", fault)
            await asyncio.sleep(RETRY_PAUSE_SECONDS)
            return
        if self._closed:
            lane.watched.signal(signal.SIGKILL)
        elif shared:
            self._shared.append(lane)
        else:
            self._spares.append(lane)
        self._audience.on_ready()

    def _create(self, name: str, shared: bool) -> Any:
        """Blocks for as long as Ray's control service does: never on the event loop."""
        options = {
            "name": name,
            "namespace": self._config.namespace,
            "lifetime": "detached",
            "num_cpus": 0,
            "num_gpus": 0,
            "max_restarts": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self.ray_node, soft=False),
        }
        config = self._config
        return (
            ray.remote(Runner)
            .options(**options)
            .remote(config.task_path, shared=shared, user=config.task_user)
        )

    def _lane(self, name: str, actor: Any, process: ProcessId, *, shared: bool) -> Lane:
        audience = self._audience
        return Lane(
            name, actor, process, shared=shared, on_report=audience.on_report, on_end=audience.on_end
        )  # fmt: skip


async def describe(actor: Any) -> dict[str, Any] | None:
    """What a runner says of itself; None if it does not answer, or speaks another protocol."""
    try:
        told: dict[str, Any] = await asyncio.wait_for(actor.describe.remote(), ANSWER_SECONDS)
    except (RayError, TimeoutError):
        return None
    return told if told["protocol"] == PROTOCOL else None
