"""One process that is gateway and leader at once, around one World."""

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import structlog
import uvicorn

from service.adapters.blobs.directory import DirectoryBlobs
from service.adapters.sql.clock import DatabaseClock
from service.adapters.sql.store import SqlStore
from service.bootstrap.compose import (
    defaults_of,
    fill,
    inventory_rules_of,
    kinds_of,
    limits_of,
    new_executor,
    policy_of,
)
from service.bootstrap.premises import own_host, write_private
from service.broker.dispatch import Dispatcher
from service.broker.loop import Leader
from service.broker.observe import Observer
from service.core.events import Event
from service.core.units import Seconds, TaskId
from service.core.world import World
from service.gateway.app import create_app
from service.gateway.identity import EVERY_SCOPE, Tokens, new_token
from service.gateway.parts import GatewayParts
from service.gateway.waiters import Waiters
from service.ports import Progress, StoreUnavailable
from service.settings import Settings, default_data_dir

log = structlog.get_logger("gpubroker")


class Service:
    """One process that is gateway and leader at once, around one World."""

    def __init__(self, settings: Settings, listener: socket.socket, store: SqlStore) -> None:
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        self._settings = settings
        self._listener = listener
        self._store = store
        self._clock = DatabaseClock(store)
        self._world = World(Seconds(settings.policy.usage_half_life_seconds))
        self._waiters = Waiters()
        self._progress: dict[TaskId, Progress] = {}
        self._blobs = DirectoryBlobs(
            settings.data_dir / "blobs",
            max_bytes=max(
                settings.limits.body_bytes, settings.limits.result_bytes, settings.limits.checkpoint_bytes
            ),
        )
        self._executor = new_executor(settings, self._clock)
        self._policy = policy_of(settings)
        self._leader = self._new_leader()
        self._tokens = Tokens(store, self._clock)
        self._verified_at = time.monotonic()
        self._stop = asyncio.Event()
        self._stop_cluster = False
        self._fault: BaseException | None = None
        """Why this process must not go on."""

    async def run(self) -> int:
        """Lead and serve until asked to stop; the exit code.

        The cluster goes on unless the stop said otherwise. Each part lives as long as the service: one that
        ends before, for whatever reason, ends the service, which a supervisor then starts anew. Raises
        StoreUnavailable if the database goes away before anything has begun.
        """
        make_full_collections_rare()
        await self._clock.read()
        fill(self._world, await self._store.snapshot())
        self._store.listen(self._on_events)
        await self._tokens.load()
        await self._write_client_file()
        server = QuietServer(self._http_config())
        self._stop_on_signals()
        serving = self._begin("http", server.serve(sockets=[self._listener]))
        jobs = [
            self._begin("leader", self._leader.run()),
            self._begin("clock", self._clock.keep()),
            self._begin("tokens", self._tokens.keep_fresh()),
            self._begin("objects", self._blobs.keep_clean(self._store.referenced)),
            self._begin("picture", self._verify()),
        ]
        sys.stderr.write("".join(f"{line}\n" for line in greeting(self._settings, self._url)))
        sys.stderr.flush()
        await self._stop.wait()
        self._waiters.close()
        server.should_exit = True
        await asyncio.wait([serving])
        for job in jobs:
            job.cancel()
        await asyncio.wait(jobs)
        await self._executor.close(stop_cluster=self._stop_cluster)
        sys.stderr.write(f"{farewell(self._settings, len(self._world.active), self._stop_cluster)}\n")
        return 0 if self._fault is None else 1

    def _begin(self, name: str, part: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(part, name=name)
        task.add_done_callback(self._on_end)
        return task

    def _on_end(self, part: asyncio.Task[None]) -> None:
        if not self._stop.is_set():
            fault = None if part.cancelled() else part.exception()
            self._fail(part.get_name(), fault or RuntimeError("it ended, though nobody had asked it to"))

    def _fail(self, part: str, fault: BaseException) -> None:
        """Stop, and say so: going on without this part would look like service and be none."""
        log.error("stopping: a part of the service ended", subject=part, fault=repr(fault), exc_info=fault)
        self._fault = fault
        self._stop.set()

    def _new_leader(self) -> Leader:
        settings = self._settings
        observer = Observer(
            self._world,
            self._policy,
            self._blobs,
            inventory_rules_of(settings),
            settings.limits.inline_bytes,
            self._progress,
        )
        dispatcher = Dispatcher(self._store, self._blobs, self._executor, self._world, self._clock)
        return Leader(
            name=self._name,
            world=self._world,
            policy=self._policy,
            store=self._store,
            executor=self._executor,
            observer=observer,
            dispatcher=dispatcher,
            clock=self._clock,
        )

    def _on_events(self, events: Sequence[Event]) -> None:
        """Raises what went wrong, so that the store hears of it as well and lets nobody write any more."""
        try:
            self._world.apply(events)
            self._verified_at = time.monotonic()
            self._leader.on_events(events)
            self._waiters.on_events(events)
        except Exception as fault:
            self._fail("picture", fault)
            raise

    async def _verify(self) -> None:
        """Compare with the head of the log, so that `as_of` is a fact even when nothing happens.

        While the database is away the picture grows old, and says so.
        """
        while True:
            began = time.monotonic()
            with contextlib.suppress(StoreUnavailable):
                if await self._store.head() <= self._world.position:
                    self._verified_at = began
            await asyncio.sleep(1.0)

    def _http_config(self) -> uvicorn.Config:
        settings = self._settings
        parts = GatewayParts(
            store=self._store,
            world=self._world,
            policy=self._policy,
            kinds=kinds_of(self._settings),
            blobs=self._blobs,
            clock=self._clock,
            limits=limits_of(settings),
            defaults=defaults_of(settings),
            identity=self._tokens,
            allowed_entrypoints=tuple(settings.entrypoints),
            allowed_hosts=(*settings.allowed_hosts, self._host),
            progress=self._progress,
            executor_status=self._executor.status,
            age_seconds=lambda: time.monotonic() - self._verified_at,
            shutdown=self._shut_down,
            term=lambda: self._leader.leadership.term if self._leader.leadership.leading else None,
            forecasts=lambda: self._leader.foresight.forecasts,
            waiters=self._waiters,
        )
        return uvicorn.Config(
            create_app(parts), http="httptools", loop="none", log_config=None, access_log=False,
            lifespan="off", server_header=False, proxy_headers=False, timeout_graceful_shutdown=5,
        )  # fmt: skip

    def _shut_down(self, stop_cluster: bool) -> None:
        self._stop_cluster = stop_cluster
        self._stop.set()

    def _stop_on_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._shut_down, False)

    @property
    def _host(self) -> str:
        return own_host(self._listener.getsockname()[0])

    @property
    def _url(self) -> str:
        host, port = self._host, self._listener.getsockname()[1]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _write_client_file(self) -> None:
        """On the first start make the admin token; always say where this service is."""
        path = self._settings.data_dir / "client.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        secret = known.get("token", "")
        if self._tokens.identify(secret) is None:
            name = f"admin-{int(self._clock.now())}" if await self._store.tokens() else "admin"
            secret, row = new_token(
                name, tenant="default", scopes=[EVERY_SCOPE], max_priority=100, now=self._clock.now()
            )
            await self._store.put_token(row, by=self._name)
            await self._tokens.load()
        write_private(path, json.dumps({"url": self._url, "token": secret}))


class QuietServer(uvicorn.Server):
    """Signals are the service's business; uvicorn would raise them again after its own end."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def make_full_collections_rare() -> None:
    """The queue in memory is large and lives long: a full collection walks all of it and finds nothing.

    The others are kept small, since requests and planning wait for them.
    """
    gc.freeze()
    gc.set_threshold(1_000, 5, 20_000)


def greeting(settings: Settings, url: str) -> list[str]:
    """What the person who started the service reads first."""
    lines = [
        f"gpubroker listens on {url}",
        f"  address and token for this machine: {settings.data_dir / 'client.json'}",
        "  try: gpubroker gpus",
    ]
    if settings.data_dir != default_data_dir():
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


def farewell(settings: Settings, runs: int, stop_cluster: bool) -> str:
    """What the person who stopped the service reads last: a stop ends neither runs nor Ray."""
    if stop_cluster or settings.engine != "ray":
        return "gpubroker stopped"
    ray = "Ray" if settings.ray.address else "the local Ray"
    who = f"{runs} {'run' if runs == 1 else 'runs'} and {ray} go on" if runs else f"{ray} goes on"
    return f"gpubroker stopped; {who} and will be found again at the next start; `gpubroker down` ends them"
