"""Runner processes that are started ahead: blank spares for one run each, and warm ones that small runs
share."""

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import psutil
import ray
import structlog
from gpubroker.runtime.messages import Report
from gpubroker.runtime.objects import SharedBytes
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gpubroker_server.adapters.ray.agent.host_meter import RaySession
from gpubroker_server.adapters.ray.agent.runner import MAX_CALLS, Runner
from gpubroker_server.adapters.ray.agent.runner_process import RunnerProcess, describe
from gpubroker_server.adapters.ray.options import AgentConfig
from gpubroker_server.adapters.ray.processes import ProcessId, files_opened_by, name_of, process_id

log = structlog.get_logger("gpubroker.agent")

GPU_FILES = tuple(f"/dev/nvidia{number}" for number in range(10))
"""The beginnings of the paths of GPU devices. Every user of CUDA also opens other files whose paths begin
with `/dev/nvidia`."""
STARTING_AT_ONCE = 2
SLOW_SECONDS = 20.0
"""While a start takes longer than this, processes start one at a time: the node is busy, and each start
takes a CPU."""
REFILL_PAUSE_SECONDS = 0.2
"""The pause before a spare is replaced. Starting a process takes a CPU, which the run that has just begun
gets first."""
RETRY_PAUSE_SECONDS = 1.0
AGENT_CALLS = 1_000
"""The calls to one process at once that are reserved for its agent, so that the agent never waits for calls
to workers of sets."""
OBJECT_CACHE_SHARE = 0.5
"""The share of a node's object store of Ray that may hold objects for later runs."""
START_SECONDS = 60.0
"""The time after which a start is given up if no starting process makes progress. The process is then killed
and another one is started. While processes make progress, as on a busy machine, killing one would only add
load."""
LONGEST_START_SECONDS = 900.0
STARTING_NAMES = ("python", "ray::IDLE", "ray::Runner.__i")
"""The beginnings of the process names of Ray's workers until they answer. The kernel keeps 15 characters of a
name."""


class RayRunners:
    """The runner processes of one node. They are detached actors, which outlive the agent that started them.

    Every method blocks while Ray's control service does not answer. A handle has the methods of
    `runner.Runner`; each is called by `remote(...)`, which returns an awaitable.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._prefix = f"runner/{config.node}/"
        self.node: str = ray.get_runtime_context().get_node_id()
        """The id of the node in Ray. If Ray is started again, the node has another id."""
        about = _about(self.node)
        self.host = str(about["NodeManagerAddress"])
        """The address at which other nodes reach this one."""
        store_bytes = int(about["Resources"].get("object_store_memory", 0))
        self.object_cache_bytes = int(store_bytes * OBJECT_CACHE_SHARE)
        context = ray.get_runtime_context()
        session = f"{context.get_temp_dir()}/{context.get_session_name()}"
        self.session = RaySession(session, f"{session}/ray_spilled_objects_{self.node}", store_bytes)

    def make(self, *, shared: bool) -> tuple[str, Any]:
        """Start a runner, and return its name and handle. It may still be starting."""
        config = self._config
        name = f"{self._prefix}{uuid4().hex[:8]}"
        options = {
            "name": name,
            "namespace": config.namespace,
            "lifetime": "detached",
            "num_cpus": 0,
            "num_gpus": 0,
            "max_restarts": 0,
            "max_concurrency": MAX_CALLS + AGENT_CALLS,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self.node, soft=False),
        }
        actor = ray.remote(Runner).options(**options)
        about = {"user": config.task_user, "inherit_env": config.inherit_env, "env": dict(config.task_env)}
        return name, actor.remote(config.task_path, shared=shared, **about)

    def names(self) -> list[str]:
        """Return the names of the runners that are alive."""
        named = ray.util.list_named_actors(all_namespaces=True)
        own_actors = (actor["name"] for actor in named if actor["namespace"] == self._config.namespace)
        return [name for name in own_actors if name.startswith(self._prefix)]

    def find(self, name: str) -> Any | None:
        try:
            return ray.get_actor(name, self._config.namespace)
        except ValueError:
            return None

    def kill(self, runner: Any) -> None:
        ray.kill(runner)

    def progress(self) -> float:
        """Return a number that changes while runners of this node are starting. It is computed from their
        process ids and CPU seconds."""
        seconds = 0.0
        for child in psutil.Process(os.getppid()).children():
            with contextlib.suppress(psutil.Error):
                if name_of(child.pid).startswith(STARTING_NAMES):
                    taken = child.cpu_times()
                    seconds += child.pid + taken.user + taken.system
        return seconds

    def share(self, data: bytearray) -> Any:
        """Put bytes into Ray's object store, and return the reference. They stay there while anything has a
        reference or a view."""
        return ray.put(SharedBytes(data))


def _about(node_id: str) -> dict[str, Any]:
    list_nodes: Callable[[], list[dict[str, Any]]] = ray.nodes
    [about] = (node for node in list_nodes() if node["NodeID"] == node_id)
    return about


class RunnerPool:
    """Keeps spares and warm processes ready. `on_ready` is called when a process has been added."""

    def __init__(
        self,
        config: AgentConfig,
        runners: RayRunners,
        on_report: Callable[[RunnerProcess, Report], None],
        on_end: Callable[[RunnerProcess], None],
        on_ready: Callable[[], None],
        waiting_starts: Callable[[], int],
    ) -> None:
        self._config = config
        self._runners = runners
        self._on_report = on_report
        self._on_end = on_end
        self._on_ready = on_ready
        self._waiting_starts = waiting_starts
        self._spares: deque[RunnerProcess] = deque()
        self._shared: list[RunnerProcess] = []
        self._starting: dict[asyncio.Task[None], bool] = {}
        """The starts under way; the value is True for a shared process."""
        self._refill: asyncio.TimerHandle | None = None
        self._starts_slowly = False
        self._closed = False

    @property
    def ready(self) -> list[RunnerProcess]:
        return [*self._spares, *self._shared]

    def take_spare(self) -> RunnerProcess | None:
        """Return a blank process and remove it from the pool; None if there is none."""
        process = None
        while self._spares and (process is None or process.watched.ended):
            process = self._spares.popleft()
        self.refill()
        return process if process is not None and not process.watched.ended else None

    def give_back(self, process: RunnerProcess) -> None:
        """Put back a spare that was taken and got no run."""
        self._spares.appendleft(process)

    def least_busy_shared(self) -> RunnerProcess | None:
        processes = [process for process in self._shared if not process.retiring]
        return min(processes, key=lambda process: len(process.runs), default=None)

    def retire_shared(self) -> None:
        """Replace the shared processes by new ones, which import modules as they are on disk now."""
        for process in list(self._shared):
            self._retire(process)
        self.refill()

    def retire_gpu_users(self) -> None:
        """Replace each shared process that has opened a GPU. GPUs are hidden from such a process; if user
        code undoes that, the process holds GPU memory without a lease for as long as it lives."""
        for process in list(self._shared):
            opened = files_opened_by(process.watched.id.pid)
            if not process.retiring and any(path.startswith(GPU_FILES) for path in opened):
                log.warning("a process for runs without a GPU uses one; replacing it", runner=process.name)
                self._retire(process)
                self.refill()

    def _retire(self, process: RunnerProcess) -> None:
        process.retiring = True
        self.dismiss_if_done(process)

    def dismiss_if_done(self, process: RunnerProcess) -> None:
        if process.retiring and not process.runs:
            process.watched.signal(signal.SIGKILL)

    def forget(self, process: RunnerProcess) -> None:
        """Forget a process that has ended, and start another one if processes are missing."""
        if process in self._shared:
            self._shared.remove(process)
        if process in self._spares:
            self._spares.remove(process)
        self.refill()

    def refill(self) -> None:
        """Start missing processes: at once if there is no spare, otherwise after a pause."""
        if self._refill is not None:
            self._refill.cancel()
        pause = REFILL_PAUSE_SECONDS if self._spares else 0.0
        self._refill = asyncio.get_running_loop().call_later(pause, self._start_missing)

    def adopt(
        self, name: str, actor: Any, process: ProcessId, *, shared: bool, protocol: int
    ) -> RunnerProcess:
        """Take over a runner that an earlier agent started. Raises ProcessLookupError if its process is gone.

        The runner finishes its runs and gets no new ones, because the configuration may have changed since
        its start.
        """
        adopted = self._process(name, actor, process, shared, protocol)
        adopted.retiring = True
        if shared:
            self._shared.append(adopted)
        return adopted

    async def close(self) -> None:
        """Kill all processes of the pool. A process that is still starting is killed once it has started."""
        self._closed = True
        for process in self.ready:
            process.watched.signal(signal.SIGKILL)
        await asyncio.gather(*self._starting, return_exceptions=True)

    def _start_missing(self) -> None:
        if self._closed:
            return
        for shared in self._missing():
            if len(self._starting) >= (1 if self._starts_slowly else STARTING_AT_ONCE):
                return
            start = asyncio.create_task(self._start(shared))
            self._starting[start] = shared
            start.add_done_callback(self._on_started)

    def _missing(self) -> Iterator[bool]:
        """Yield one value per missing process, which is True for a shared one. Shared processes come
        first."""
        starting_shared = sum(self._starting.values())
        warm = sum(not process.retiring for process in self._shared)
        yield from [True] * (self._config.warm_runners - warm - starting_shared)
        starting_spares = len(self._starting) - starting_shared
        wanted = self._config.spares + self._waiting_starts()
        yield from [False] * (wanted - len(self._spares) - starting_spares)

    def _on_started(self, start: "asyncio.Task[None]") -> None:
        del self._starting[start]
        self._start_missing()

    async def _start(self, shared: bool) -> None:
        try:
            self._add(await self._started(shared))
        except Exception as fault:
            log.warning("cannot start a runner process; trying again", fault=repr(fault))
            await asyncio.sleep(RETRY_PAUSE_SECONDS)

    def _add(self, process: RunnerProcess) -> None:
        if self._closed:
            process.watched.signal(signal.SIGKILL)
            return
        (self._shared if process.shared else self._spares).append(process)
        self._on_ready()

    async def _started(self, shared: bool) -> RunnerProcess:
        loop = asyncio.get_running_loop()
        began = loop.time()
        name, actor = await asyncio.to_thread(self._runners.make, shared=shared)
        try:
            try:
                described = await self._described(actor)
            finally:
                self._starts_slowly = loop.time() - began > SLOW_SECONDS
            process = process_id(described["pid"])
            return self._process(name, actor, process, shared, described["protocol"])
        except Exception:
            await asyncio.to_thread(self._runners.kill, actor)
            raise

    async def _described(self, actor: Any) -> dict[str, Any]:
        """Return the answer of a starting runner, and wait for it as long as starts make progress. Raises
        TimeoutError, and the exceptions of `describe`."""
        asking = asyncio.ensure_future(describe(actor, LONGEST_START_SECONDS))
        try:
            await asyncio.wait([asking], timeout=START_SECONDS)
            while not asking.done():
                before = await asyncio.to_thread(self._runners.progress)
                await asyncio.wait([asking], timeout=START_SECONDS / 4)
                if not asking.done() and await asyncio.to_thread(self._runners.progress) == before:
                    raise TimeoutError(f"no process that is starting got on after {START_SECONDS:g} s")
                log.warning("processes start slowly; waiting on")
            return asking.result()
        finally:
            asking.cancel()

    def _process(
        self, name: str, actor: Any, process: ProcessId, shared: bool, protocol: int
    ) -> RunnerProcess:
        return RunnerProcess(name, actor, process, shared, protocol, self._on_report, self._on_end)
