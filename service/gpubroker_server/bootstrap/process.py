"""A process of the service, with its roles around one World, from the start until it is asked to stop."""

import asyncio
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Union

import structlog

from gpubroker_server.adapters.blobs.directory import DirectoryBlobs
from gpubroker_server.adapters.sql.store import SqlStore
from gpubroker_server.bootstrap.broker_role import BrokerRole
from gpubroker_server.bootstrap.compose import policy_of
from gpubroker_server.bootstrap.disk_watch import DiskWatch
from gpubroker_server.bootstrap.follower import LogFollower
from gpubroker_server.bootstrap.leader_status import LeaderStatus
from gpubroker_server.bootstrap.run_access import RunAccess
from gpubroker_server.bootstrap.start_checks import StartRefused, process_name
from gpubroker_server.core.domain.submission import withdrawn_entrypoints
from gpubroker_server.core.domain.visible_gpus import VARIABLE
from gpubroker_server.core.world.task_counts import tasks_by_tenant
from gpubroker_server.ports.store import Outgrown, StoreUnavailable
from gpubroker_server.settings.loading import Settings, usual_data_dir

if TYPE_CHECKING:
    from gpubroker_server.bootstrap.gateway_role import GatewayRole

log = structlog.get_logger("gpubroker")


WIND_UP_SECONDS = 0.1
"""The time in which the leader commits reports and sends orders before it stops. It is short, because
another process should lead within half a second. The next leader receives the remaining reports again."""

MAX_NAMED = 5
"""The most entrypoints that a line printed at the start names."""

CLOSE_SECONDS = 1.0
"""The part of drain_seconds that is reserved for closing the process itself."""

Part = Union[BrokerRole, LogFollower, LeaderStatus, DiskWatch, "GatewayRole"]


class Process:
    """A gateway, a broker, or both in one process around one World."""

    def __init__(
        self,
        settings: Settings,
        store: SqlStore,
        blobs: DirectoryBlobs,
        *,
        listener: socket.socket | None,
        leads: bool,
        on_start: Callable[[], None] = lambda: None,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """The process is a gateway if it has a listener, and a broker if it `leads`. `on_start` is called
        when it serves. `on_stop` is called when it is asked to stop and to leave the cluster running. Raises
        StartRefused."""
        self._name = name = process_name()
        self._settings = settings
        self._store = store
        self._blobs = blobs
        self._listener = listener
        self._on_start, self._on_stop = on_start, on_stop
        self._stop = asyncio.Event()
        self._stop_cluster = False
        self._fault: BaseException | None = None
        """The reason why this process must stop."""
        half_life_seconds = settings.policy.usage_half_life_seconds
        self._follower = follower = LogFollower(store, half_life_seconds, self._fail)
        self._runs = runs = RunAccess(settings, listener)
        self._broker = broker = BrokerRole(name, settings, store, follower, blobs, runs) if leads else None
        self._lead = LeaderStatus(store, follower, policy_of(settings), broker)
        self._disks = DiskWatch([settings.data_dir, settings.objects])
        self._gateway: GatewayRole | None = None
        """The gateway; None until its module has been loaded, after the broker has begun."""

    async def run(self) -> int:
        """Work until asked to stop, and return the exit code.

        The cluster keeps running unless the request to stop says otherwise. If one part ends, for any
        reason, the process stops, and a supervisor starts it again. Raises StartRefused, and
        StoreUnavailable if the database goes away before anything has started.
        """
        make_full_collections_rare()
        await self._follower.begin()
        await self._lead.begin()
        self._stop_on_signals()
        if self._broker is not None:
            await self._broker.begin()
        leading = self._begin_all(self._broker)
        try:
            serving = [] if self._listener is None else [await self._speak(self._listener)]
            jobs = self._begin_all(self._follower, self._lead, self._disks, self._gateway)
            await self._greet()
        except BaseException:
            await self._undo_start(leading)
            raise
        await self._stop.wait()
        await self._drain(serving, leading)
        await _end(jobs)
        if self._gateway is not None:
            await self._gateway.report_absence()
        if self._broker is not None:
            await self._broker.close(stop_cluster=self._stop_cluster)
        self._say(self._farewell())
        return 0 if self._fault is None else 1

    async def _greet(self) -> None:
        self._on_start()
        self._say(*greeting(self._settings, None if self._gateway is None else self._gateway.url))
        if self._broker is not None:
            self._say(*which_ray(self._settings), *which_gpus(self._settings))
            with suppress(StoreUnavailable):
                self._say(*waiting_in_vain(self._settings, await self._store.pending_entrypoints()))

    async def _undo_start(self, leading: Sequence[asyncio.Task[None]]) -> None:
        """Stop the parts that a failed start has begun. A local Ray goes on if it has runs, which the next
        start finds again, or if other brokers may use it."""
        await _end(leading)
        if self._broker is not None:
            is_ours = not (self._settings.ray.address or self._store.is_shared)
            await self._broker.close(stop_cluster=is_ours and not self._follower.world.active)

    async def _speak(self, listener: socket.socket) -> asyncio.Task[None]:
        """Begin to serve requests. The gateway is loaded only here, while the broker already works, because
        loading it takes a quarter of the time of a start."""
        gc.disable()  # see `make_full_collections_rare`
        await asyncio.to_thread(import_module, "gpubroker_server.bootstrap.gateway_role")
        from gpubroker_server.bootstrap.gateway_role import GatewayRole

        make_full_collections_rare()
        self._gateway = GatewayRole(
            self._name, self._settings, self._store, self._follower, self._blobs, self._lead, self._broker,
            listener, self._shut_down, self._runs, self._disks.full,
        )  # fmt: skip
        await self._gateway.begin()
        return self._begin("http", self._gateway.serve())

    async def _drain(
        self, serving: Sequence[asyncio.Task[None]], leading: Sequence[asyncio.Task[None]]
    ) -> None:
        """Finish the requests and commits that are under way. The leader resigns first, so that the next
        leader need not wait for the last request."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        has_no_fault = self._fault is None
        if self._gateway is not None:
            self._gateway.drain()
        if has_no_fault and self._broker is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(WIND_UP_SECONDS):
                    await self._broker.wind_up()
        await _end(leading)
        if self._gateway is None:
            return
        if has_no_fault:
            await asyncio.sleep(max(0.0, began + self._settings.drain_notice_seconds - loop.time()))
        self._gateway.stop(began + self._settings.drain_seconds - CLOSE_SECONDS - loop.time())
        await asyncio.wait(serving)

    def _farewell(self) -> str:
        if self._broker is None:
            return "gpubroker stopped"
        return farewell(self._settings, self._runs_under_way(), self._stop_cluster)

    def _runs_under_way(self) -> int:
        return sum(tasks_by_tenant(self._follower.world)[1].values())

    def _begin_all(self, *parts: Part | None) -> list[asyncio.Task[None]]:
        return [self._begin(name, job) for part in parts if part is not None for name, job in part.jobs()]

    def _begin(self, name: str, part: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(part, name=name)
        task.add_done_callback(self._on_end)
        return task

    def _on_end(self, part: asyncio.Task[None]) -> None:
        fault = None if part.cancelled() else part.exception()
        if not self._stop.is_set():
            self._fail(part.get_name(), fault or RuntimeError("it ended although it was not asked to"))
        elif fault is not None:
            log.warning("a part failed while the service ended", subject=part.get_name(), fault=repr(fault))

    def _fail(self, part: str, fault: BaseException) -> None:
        """Stop the process after one of its parts has ended, because the service would only seem to work
        without it."""
        says_all = isinstance(fault, Outgrown | StartRefused)  # a mistake in the code needs its traceback
        trace = None if says_all else fault
        log.error("stopping: a part of the service ended", subject=part, fault=repr(fault), exc_info=trace)
        self._fault = fault
        self._stop.set()

    def _shut_down(self, stop_cluster: bool) -> None:
        self._stop_cluster = stop_cluster
        self._stop.set()
        if not stop_cluster:
            self._on_stop()

    def _stop_on_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._shut_down, False)

    def _say(self, *lines: str) -> None:
        """Write lines for people to standard error, or each as a log line if the log format is JSON."""
        if self._settings.log_format == "json":
            for line in lines:
                log.info(line.strip())
            return
        with suppress(OSError, ValueError, AttributeError):  # standard error is closed or missing
            sys.stderr.write("".join(f"{line}\n" for line in lines))
            sys.stderr.flush()


async def _end(jobs: Sequence[asyncio.Task[None]]) -> None:
    for job in jobs:
        job.cancel()
    if jobs:
        await asyncio.wait(jobs)


def make_full_collections_rare() -> None:
    """Set the garbage collector so that full collections are rare: they walk the whole queue in memory and
    find nothing.

    Young collections are small, because requests and planning wait for them. Objects that survive two of
    them stay until a full collection, so requests and planning must not leave reference cycles behind (ADR
    70). Objects that exist at this call are left out of all collections.
    """
    gc.freeze()
    gc.set_threshold(100, 1, 600_000)
    gc.enable()


def greeting(settings: Settings, url: str | None) -> list[str]:
    """Return the lines that a start prints. `url` is that of the gateway; None without one."""
    if url is None:
        return ["gpubroker broker is up; it serves no HTTP"]
    lines = [
        f"gpubroker listens on {url}",
        f"  address and token for this machine: {settings.data_dir / 'client.json'}",
        "  try: gpubroker gpus",
    ]
    if settings.triton.grpc_port is not None:
        lines.insert(1, f"  clients of Triton over gRPC: port {settings.triton.grpc_port}")
    if settings.data_dir != usual_data_dir():
        lines.append(f"  clients find it with: export GPUBROKER_DATA_DIR={settings.data_dir}")
    if not settings.entrypoints:
        lines.append("  note: no entrypoint is allowed yet; set entrypoints, such as myteam.*:*")
    if os.geteuid() != 0:
        lines.append("  note: the scopes tasks:code and tasks:command equal a shell as this user")
    else:
        lines.append(
            "  warning: the service is root, so the scopes tasks:code and tasks:command equal a root shell; "
            "task_user keeps accidents from that, not attackers"
        )
    return lines


def which_ray(settings: Settings) -> list[str]:
    """Return the lines that a start prints about the Ray that runs its tasks."""
    if settings.engine != "ray":
        return ["  tasks only wait (engine: simulated)"]
    address, named = settings.ray.address, os.environ.get("RAY_ADDRESS", "")
    if address:
        lines = [
            f"  tasks run on the Ray cluster at {address}, which was joined and is never stopped from here"
        ]
    else:
        lines = ["  tasks run on a local Ray, which the service starts, or finds again"]
    if named not in ("", address):
        lines.append(f"  note: RAY_ADDRESS={named} is not used; name a cluster to join with --ray host:6379")
    return lines


def which_gpus(settings: Settings) -> list[str]:
    """Return the lines that a start prints about the GPUs that it uses; none if it uses all GPUs of each
    machine."""
    variable, named = os.environ.get(VARIABLE), settings.ray.gpus
    if settings.engine != "ray" or settings.simulated_devices:
        return []
    if named is not None:
        instead = "" if variable is None else f", and not {VARIABLE}={variable}"
        return [f"  GPUs: ray.gpus decides which are used: {','.join(named) or 'none'}{instead}"]
    if variable is None:
        return []
    if settings.ray.address:
        line = (
            f"  note: {VARIABLE}={variable} of this service is not used: each node of the cluster has one of "
            "its own, and ray.gpus goes before it"
        )
        return [line]
    return [f"  GPUs: {VARIABLE} decides which are used: {variable or 'none'}; ray.gpus goes before it"]


def waiting_in_vain(settings: Settings, pending: Mapping[str, int]) -> list[str]:
    """Return the line that a start prints about waiting tasks whose entrypoints are no longer allowed.
    `pending` maps the entrypoints of waiting tasks to the number of these tasks."""
    withdrawn = withdrawn_entrypoints(tuple(settings.entrypoints), pending)
    if not withdrawn:
        return []
    names = ", ".join(f"{name} ({count})" for name, count in withdrawn[:MAX_NAMED])
    more = f", and {len(withdrawn) - MAX_NAMED} more" if len(withdrawn) > MAX_NAMED else ""
    tasks = sum(count for _, count in withdrawn)
    waiting = (
        "1 waiting task names an entrypoint" if tasks == 1 else f"{tasks} waiting tasks name entrypoints"
    )
    line = (
        f"  warning: {waiting} that the setting entrypoints does not allow any more: {names}{more}. They fail"
        " when it is their turn; allow them again, or cancel them (gpubroker ps --state pending)"
    )
    return [line]


def farewell(settings: Settings, runs: int, stop_cluster: bool) -> str:
    """Return the line that a stop prints. It says that the runs and Ray go on, unless the cluster is stopped
    too."""
    if stop_cluster or settings.engine != "ray":
        return "gpubroker stopped"
    ray = "Ray" if settings.ray.address else "the local Ray"
    rest = f"{runs} {'run' if runs == 1 else 'runs'} and {ray} go on" if runs else f"{ray} goes on"
    return f"gpubroker stopped; {rest} and will be found again at the next start; `gpubroker down` ends them"
