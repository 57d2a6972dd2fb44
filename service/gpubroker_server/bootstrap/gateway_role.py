"""The gateway's role of a process, which serves HTTP."""

import asyncio
import contextlib
import json
import os
import pwd
import socket
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import uvicorn
from gpubroker.wire.bounds import MOST_PRIORITY

from gpubroker_server.adapters.blobs.directory import DirectoryBlobs
from gpubroker_server.adapters.clock import boot_seconds
from gpubroker_server.adapters.python_modules import PythonModules
from gpubroker_server.adapters.ray.driver.executor import RayExecutor
from gpubroker_server.adapters.ray.driver.worker_calls import CallingDriver
from gpubroker_server.adapters.sql.store import SqlStore
from gpubroker_server.bootstrap.broker_role import BrokerRole
from gpubroker_server.bootstrap.compose import (
    defaults_of,
    environment_policy_of,
    hosts_of,
    kinds_of,
    limits_of,
    policy_of,
    ray_options_of,
)
from gpubroker_server.bootstrap.follower import Job, LogFollower
from gpubroker_server.bootstrap.jwt_access import JwtAccess, jwt_access_of
from gpubroker_server.bootstrap.leader_status import LeaderStatus
from gpubroker_server.bootstrap.model_servers import lane_options_of, served_of, servers_of
from gpubroker_server.bootstrap.run_access import RunAccess, secrets_of, url_of
from gpubroker_server.bootstrap.start_checks import allow_open_files, own_host, write_private
from gpubroker_server.core.admission.permissions import Permissions
from gpubroker_server.gateway.app import create_app
from gpubroker_server.gateway.cluster.idle_templates import keep_filling
from gpubroker_server.gateway.parts import AppParts, OperatorRules
from gpubroker_server.gateway.submission.capacity import Capacity
from gpubroker_server.gateway.submission.translation import CLOUDPICKLE, PYTHON
from gpubroker_server.http.connections import Connections, limited_by
from gpubroker_server.http.identity import (
    EVERY_SCOPE,
    Callers,
    Identity,
    Tokens,
    identity_of_run,
    new_token,
)
from gpubroker_server.http.ids import Ids
from gpubroker_server.http.proxies import TrustedProxies
from gpubroker_server.http.waiters import Waiters
from gpubroker_server.inference.draining import Draining
from gpubroker_server.inference.health_checks import HealthChecks
from gpubroker_server.inference.holders import Adoption, QueuedModels
from gpubroker_server.inference.lanes import Lanes
from gpubroker_server.inference.plane import Plane
from gpubroker_server.inference.protocols.triton_http.connection import in_front_of
from gpubroker_server.inference.residency import ResidencyParts
from gpubroker_server.inference.server_choice import Residencies
from gpubroker_server.inference.servers import Fleet
from gpubroker_server.inference.slot_leases import SlotLeases
from gpubroker_server.ports.store import StoreUnavailable
from gpubroker_server.ports.worker_calls import WorkerCalls
from gpubroker_server.settings.loading import Settings
from gpubroker_server.telemetry.metrics import Telemetry

if TYPE_CHECKING:
    from gpubroker_server.inference.protocols.triton_grpc.port import GrpcPort


NODES_AT_ONCE = 20
"""The number of nodes whose samples are added to the history before waiting requests have their turn."""
DATABASE_LOG_SECONDS = 10.0
FIRST_LOOK_SECONDS = 1.0
"""The time that a start waits for model servers to list their models."""


class GatewayRole:
    _draining: Draining | None = None
    """The draining of models; None without models that have leases."""
    _driver: CallingDriver | None = None
    """The gateway's own driver for calls to workers of a joined cluster; None if a broker in this process
    has one."""
    _slots: SlotLeases | None = None
    """The leases on slots of models; None unless several gateways divide them."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        store: SqlStore,
        follower: LogFollower,
        blobs: DirectoryBlobs,
        lead: LeaderStatus,
        broker: BrokerRole | None,
        listener: socket.socket,
        shut_down: Callable[[bool], None],
        runs: RunAccess,
        disk_full: Callable[[], str],
    ) -> None:
        self._runs = runs
        self._name, self._broker = name, broker
        self._settings, self._store = settings, store
        self._follower = follower
        self._listener = listener
        self._jwt: JwtAccess | None = jwt_access_of(settings, follower.clock)
        self._tokens = Tokens(store, follower.clock, elsewhere=self._identity_elsewhere)
        self._waiters = Waiters(settings.limits.tenant_waits)
        rules = rules_of(settings, self._host, modules_of(settings, leads=broker is not None))
        self._servers = servers_of(settings)
        self._served = served_of(settings, hosts_of(settings))
        self._residencies = self._residencies_of(rules, ids := Ids(), lead)
        self._parts = parts = AppParts(
            name=name,
            store=store,
            blobs=blobs,
            secrets=secrets_of(settings),
            follower=follower,
            leadership=lead,
            tokens=self._tokens,
            rules=rules,
            shutdown=shut_down,
            has_executor=broker is not None,
            worker_calls=self._way_to_workers(),
            waiters=self._waiters,
            ids=ids,
            access_log=settings.access_log,
            disk_full=disk_full,
            extensions=tuple if broker is None else broker.extension_rows,
            servers=self._servers,
            residencies=self._residencies,
        )
        app = create_app(parts)
        callers = Callers(parts.tokens, parts.rules.allowed_hosts)
        allow_open_files(settings.limits.connections * (1 if settings.triton.grpc_port is None else 2))
        port = Connections(settings.limits, callers, parts.ids)
        plane = self._plane(parts, callers, app.state.telemetry) if parts.servers else None
        layers: Any = app.middleware_stack  # called without the layers of FastAPI around it
        connection = limited_by(port) if plane is None else in_front_of(plane, port)
        self._calls = None if plane is None else self._grpc_port(plane)
        self._closing: asyncio.Task[None] | None = None
        self._server = server_of(layers, connection)
        self._follow(follower)

    def _follow(self, follower: LogFollower) -> None:
        """Have requests that wait, and event streams, get what the follower reads."""
        subscriptions = self._parts.subscriptions
        follower.listen(self._waiters.on_events)
        follower.listen(subscriptions.on_events)
        follower.on_reread.append(lambda _fault: self._waiters.wake_all())
        follower.on_reread.append(lambda _fault: subscriptions.end_all())

    async def begin(self) -> None:
        await self._tokens.load()
        await self._write_client_file()
        if len(self._parts.servers) > 1:  # so that the first request finds its model
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_LOOK_SECONDS):
                    await HealthChecks(self._servers).check_all()
        if self._draining is not None and self._store.is_shared:
            await self._draining.report(self._store, self._name, self._follower.clock.now())
        if self._calls is not None:
            await self._calls.begin()

    def jobs(self) -> list[Job]:
        jobs: list[Job] = [("tokens", self._tokens.keep_fresh(self._store.tokens_changed))]
        if self._jwt is not None:
            jobs.append(("keys of issuers", self._jwt.keep_keys_fresh()))
        jobs.append(("idle templates", keep_filling(self._parts)))
        jobs.append(("logs that are read", self._parts.log_readers.keep()))
        jobs.append(("history of samples", self._keep_history()))
        jobs.append(("log of the database", self._keep_database_log()))
        if self._residencies is not None:
            jobs.append(("use of models", self._residencies.keep_reporting()))
            jobs.append(("models of inferences", QueuedModels(self._residencies).keep()))
            jobs.append(("models without a holder", Adoption(self._residencies).keep()))
        if self._draining is not None and self._store.is_shared:
            keep = self._draining.keep_reporting(self._store, self._name, self._follower.clock)
            jobs.append(("presence", keep))
        if self._slots is not None:
            jobs.append(("slots of models", self._slots.keep()))
        if self._parts.servers:
            jobs.append(("servers of models", HealthChecks(self._servers).keep()))
        return jobs

    async def serve(self) -> None:
        """Serve requests until `stop`."""
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            if self._calls is not None:
                await (self._closing or self._calls.close(0))
            for server in self._servers:
                await server.close()
            for _, host in self._served:
                await host.close()

    def drain(self) -> None:
        """Report that this process ends, answer waiting requests now, and end the event streams."""
        self._waiters.close()
        self._parts.subscriptions.close()

    def stop(self, most_seconds: float) -> None:
        """Accept no new requests. Requests under way may be answered within `most_seconds`."""
        self.drain()
        self._server.config.timeout_graceful_shutdown = max(1, int(most_seconds))
        self._server.should_exit = True
        if self._calls is not None:
            self._closing = asyncio.create_task(self._calls.close(most_seconds))

    async def report_absence(self) -> None:
        """Report that this gateway is gone. Call this after `serve` and all jobs have ended, because they
        would report the gateway again."""
        with contextlib.suppress(StoreUnavailable):  # the leader notices in a few seconds
            if self._draining is not None and self._store.is_shared:
                await self._store.absent(self._name)
            if self._slots is not None:
                await self._slots.drop()
            if self._driver is not None:
                await self._driver.close()

    def _way_to_workers(self) -> WorkerCalls | None:
        """Return the driver for calls to workers: that of the broker in this process, or a driver of the
        gateway's own for a joined cluster. A local Ray belongs to the process that has started it, so
        another process gets None."""
        if self._broker is not None:
            executor = self._broker.executor
            return executor.calls if isinstance(executor, RayExecutor) else None
        has_ray = self._settings.engine == "ray" and find_spec("ray") is not None
        if not has_ray or not self._settings.ray.address:
            return None
        self._driver = CallingDriver(ray_options_of(self._settings))
        return self._driver

    async def _keep_history(self) -> None:
        while True:
            for taken, _ in enumerate(self._parts.history.follow(self._follower.world), 1):
                if taken % NODES_AT_ONCE == 0:
                    await asyncio.sleep(0)
            await asyncio.sleep(self._parts.rules.policy.sample_period_seconds)

    async def _keep_database_log(self) -> None:
        while True:
            with contextlib.suppress(StoreUnavailable):  # the last known size stays
                size_bytes = await self._store.log_bytes()
                self._parts.database_log.look(size_bytes, self._follower.clock.now())
            await asyncio.sleep(DATABASE_LOG_SECONDS)

    @property
    def url(self) -> str:
        return url_of(self._listener)

    def _identity_elsewhere(self, token: str) -> Identity | None:
        """Return the holder of a token that is not in the store. Raises Problem for a JWT that is not
        accepted."""
        run = self._runs.run_of(token)
        if run is None:
            return None if self._jwt is None else self._jwt.identity_of(token)
        task = self._follower.world.tasks.get(run.task)
        return identity_of_run(task, run.fence, brings_code=run.brings_code)

    @property
    def _host(self) -> str:
        return own_host(self._listener.getsockname()[0])

    def _plane(self, parts: AppParts, callers: Callers, telemetry: Telemetry) -> Plane:
        lanes = Lanes(lane_options_of(self._settings), on_waited=telemetry.on_waited, now=boot_seconds)
        slots = self._settings.triton.slots
        if slots and self._store.is_shared:
            self._slots = SlotLeases(
                self._name, slots, lanes, self._store, self._follower.clock, parts.leadership.leader
            )
        fleet = Fleet(self._servers, self._residencies)
        telemetry.show_lanes(lanes.figures)
        if self._residencies is not None:
            self._draining = Draining(parts.follower.world, lanes, parts.rules.policy)
            self._follower.listen(self._draining.on_events)
            if self._broker is not None:
                self._broker.let_go, self._broker.in_use = self._draining.drained, self._draining.in_use
        telemetry.show_servers(fleet.rows)
        return Plane(
            callers=callers,
            ids=parts.ids,
            on_request=telemetry.on_request,
            on_call=telemetry.on_call,
            fleet=fleet,
            lanes=lanes,
            most_body_bytes=self._settings.triton.body_bytes,
            most_waiting_bytes=self._settings.triton.waiting_bytes,
            tenant_requests=self._settings.limits.tenant_requests,
            takes_files=self._settings.triton.load_files,
            residencies=self._residencies,
            audit=self._store.audit,
            access_log=self._settings.access_log,
            proxies=TrustedProxies(self._settings.trusted_proxies),
        )

    def _residencies_of(self, rules: OperatorRules, ids: Ids, lead: LeaderStatus) -> Residencies | None:
        """Return the residencies; None if no model server is in the ledger."""
        world = self._follower.world
        parts = ResidencyParts(
            world=world,
            policy=rules.policy,
            clock=self._follower.clock,
            store=self._store,
            ids=ids,
            waiters=self._waiters,
            fleet=Capacity(world, rules.policy),
            admission=rules.admission,
            forecasts=lead.forecasts,
            settle_seconds=rules.limits.settle_seconds,
        )
        return Residencies(parts, self._served) if self._served else None

    def _grpc_port(self, plane: Plane) -> "GrpcPort | None":
        """Open the gRPC port if the settings name one. Raises StartRefused."""
        if self._settings.triton.grpc_port is None:
            return None
        from gpubroker_server.bootstrap.grpc_proxy import grpc_port_of

        return grpc_port_of(self._settings, plane, self._listener.getsockname()[0])

    async def _write_client_file(self) -> None:
        """Write the file with the service's URL and a token for clients on this machine. The first start
        creates the admin token."""
        path = self._settings.data_dir / "client.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        secret = known.get("token", "")
        if self._tokens.identify(secret) is None:
            names = "admin", f"admin-{int(self._follower.clock.now())}-{os.getpid()}"
            secret = await self._new_admin(names[0]) or await self._new_admin(names[1]) or ""
            await self._tokens.load()
        write_private(path, json.dumps({"url": self.url, "token": secret}))

    async def _new_admin(self, name: str) -> str | None:
        """Return the secret of a new token with every scope; None if a token of this name exists, perhaps
        because another gateway started at the same moment."""
        now = self._follower.clock.now()
        secret, row = new_token(
            name, tenant="default", scopes=[EVERY_SCOPE], max_priority=MOST_PRIORITY, now=now
        )
        return secret if await self._store.put_token(row, by=self._name) else None


def rules_of(settings: Settings, host: str, modules: PythonModules | None = None) -> OperatorRules:
    """Return the operator's rules. `host` is the address of the gateway's own port. `modules` are the
    modules that runs import, if all runs are on this machine."""
    return OperatorRules(
        permissions=Permissions(
            policy_of(settings),
            settings.entrypoints,
            PYTHON,
            CLOUDPICKLE,
            settings.env_allowed,
            modules,
        ),
        defaults=defaults_of(settings),
        environments=environment_policy_of(settings),
        limits=limits_of(settings),
        kinds=kinds_of(settings),
        allowed_hosts=(*settings.allowed_hosts, host),
        task_user=settings.task_user or _own_user(),
        trusted_proxies=settings.trusted_proxies,
        root_path=settings.root_path,
    )


def _own_user() -> str:
    """Return the name of this process's user; empty if the machine has no name for it."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return ""


def modules_of(settings: Settings, *, leads: bool) -> PythonModules | None:
    """Return the modules that runs import, or None unless all runs are on this machine: other nodes have
    files of their own. `leads` is True if this process may lead; with SQLite no other process does."""
    is_alone = leads and settings.database.startswith("sqlite")
    if not is_alone or settings.engine != "ray" or settings.ray.address:
        return None
    return PythonModules(tuple(map(str, settings.task_path)) or (os.getcwd(),))


def server_of(app: Any, connection: type[asyncio.Protocol]) -> "QuietServer":
    """Return the server of an app whose connections are of this class."""
    config = uvicorn.Config(
        app, http=connection, ws="none", loop="none",
        log_config=None, access_log=False, lifespan="off", server_header=False, proxy_headers=False,
    )  # fmt: skip
    return QuietServer(config)


class QuietServer(uvicorn.Server):
    """A server of uvicorn that leaves signals to the process. Otherwise uvicorn would raise them again at
    its end."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()
