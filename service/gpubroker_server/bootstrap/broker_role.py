"""The broker's role of a process: the leader candidate, its leader, the executor, and the model servers."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import random

from gpubroker import __version__
from msgspec.structs import replace

from gpubroker_server.adapters.blobs.directory import DirectoryBlobs
from gpubroker_server.adapters.clock import WallClock, boot_seconds
from gpubroker_server.adapters.extensions import ExtensionRefused, RunningExtension, installed
from gpubroker_server.adapters.ray.driver.executor import RayExecutor
from gpubroker_server.adapters.sql.store import SqlStore
from gpubroker_server.adapters.triton.server_process import is_gone
from gpubroker_server.bootstrap.compose import (
    fleet_rules_of,
    host_use,
    hosts_of,
    inventory_rules_of,
    leader_term_rules_of,
    new_executor,
    policy_of,
)
from gpubroker_server.bootstrap.follower import Job, LogFollower, publish_seconds
from gpubroker_server.bootstrap.model_servers import inference_clients_of
from gpubroker_server.bootstrap.run_access import RunAccess, secrets_of
from gpubroker_server.bootstrap.start_checks import StartRefused, other_ray
from gpubroker_server.broker.background import (
    Pruner,
    Publisher,
    ResourceRequests,
    SlotDivider,
    gateways_have_let_go,
    keep_for_the_next_start,
    models_in_use,
    watch_left_servers,
    watch_model_use,
)
from gpubroker_server.broker.dispatch import Dispatcher
from gpubroker_server.broker.fleet import FleetKeeper
from gpubroker_server.broker.inference_dispatch import InferenceDispatcher
from gpubroker_server.broker.leadership import LeaderCandidate
from gpubroker_server.broker.loop import Leader
from gpubroker_server.broker.model_dispatch import ModelDispatcher, ModelDispatchRules
from gpubroker_server.broker.observe import Observer
from gpubroker_server.broker.run_logs import LogKeeper
from gpubroker_server.broker.task_objects import TaskObjects
from gpubroker_server.core.control.findings.diagnose import FleetKnown, diagnose_fleet
from gpubroker_server.core.control.findings.finding import Finding
from gpubroker_server.core.control.fleet import FleetSeen
from gpubroker_server.core.domain.leader_term import LeaderTerm
from gpubroker_server.core.domain.model_orders import ModelsInUse
from gpubroker_server.core.domain.stored_objects import Quota
from gpubroker_server.core.domain.units import Seconds, Term
from gpubroker_server.core.lifecycle.silent_nodes import PausedDetection
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from gpubroker_server.core.world.events import Event
from gpubroker_server.ports.last_values import LeaderSeen
from gpubroker_server.ports.store import LineageChanged, LogShortened
from gpubroker_server.settings.loading import Settings
from gpubroker_server.telemetry.table import ExtensionRow


class BrokerRole:
    def __init__(
        self,
        name: str,
        settings: Settings,
        store: SqlStore,
        follower: LogFollower,
        blobs: DirectoryBlobs,
        runs: RunAccess,
    ) -> None:
        self._runs = runs
        self._name = name
        self._settings = settings
        self._store = store
        self._follower = follower
        self._blobs = blobs
        self._policy = policy_of(settings)
        self.executor = new_executor(settings, follower.clock)
        self._hosts = hosts_of(settings)
        self._clients = inference_clients_of(settings)
        self._wait_seconds = ModelDispatchRules().call_seconds if store.is_shared else Seconds(0.0)
        self.candidate = LeaderCandidate(
            name=name,
            store=store,
            executor=self.executor,
            rules=leader_term_rules_of(settings),
            ticks=boot_seconds,
            chance=random,
            new_leader=self._new_leader,
            catch_up=follower.catch_up,
            resigned=store.resigned,
        )
        clock, heard = follower.clock, lambda: follower.world.position
        self._pruner = Pruner(store, clock, settings.retention, self.term, heard, clock.may_prune)
        self.let_go: Callable[[], frozenset[str]] | None = None
        """Returns the claims on models that the gateway in this process no longer uses; None without a
        gateway. Gateways of other processes write theirs into the database."""
        self.in_use: Callable[[], ModelsInUse] | None = None
        """Returns the models that the gateway in this process uses; None without a gateway."""
        self.last_fleet: Callable[[], FleetSeen | None] = lambda: None
        """Returns the fleet as the last leader saw it, in this process or in another one."""
        self._publisher = Publisher(follower.world, follower.progress, self.seen, store)
        self._slots = SlotDivider(settings.triton.slots, store, follower.clock)
        self._extensions: list[RunningExtension] = []
        follower.listen(self._on_events)
        follower.on_reread.append(self._on_reread)

    async def begin(self) -> None:
        """Start the extensions of the settings. Raises StartRefused."""
        for name, options in self._settings.extensions.items():
            try:
                running = RunningExtension(name, installed(name))
                await asyncio.to_thread(running.start, options)
            except ExtensionRefused as fault:
                await self._stop_extensions()
                raise StartRefused(str(fault)) from fault
            self._extensions.append(running)

    def jobs(self) -> list[Job]:
        jobs = [
            ("leader", self._run_candidate()),
            ("retention", self._pruner.keep()),
            ("objects", self._blobs.keep_clean(self._store.referenced, WallClock().may_prune)),
        ]
        every_seconds = publish_seconds(self._policy)
        if not self._store.is_shared:
            kept = keep_for_the_next_start(self._store, self.seen, self.term, every_seconds)
            jobs.append(("what the next start needs", kept))
        else:
            jobs.append(("publisher", self._publisher.keep(self.term, every_seconds)))
            if self._settings.triton.slots:
                jobs.append(("slots of models", self._slots.keep(self.term, every_seconds)))
        if self._settings.ray.autoscale and isinstance(self.executor, RayExecutor):
            follower, ray = self._follower, self.executor
            requests = ResourceRequests(follower.world, self._policy, follower.clock, ray.request_resources)
            jobs.append(("requests to the autoscaler", requests.keep(self.term)))
        return jobs

    async def _run_candidate(self) -> None:
        """Run as a candidate until the log has events that this software cannot read; then resign. Raises
        the exceptions of the candidate in a group."""
        async with asyncio.TaskGroup() as group:
            running = group.create_task(self.candidate.run())
            await self._follower.is_outgrown.wait()
            running.cancel()
        await asyncio.Event().wait()  # waits until this task is cancelled

    async def check_ray(self, seen: LeaderSeen | None) -> None:
        """Check that the leader uses the Ray of this process. Raises StartRefused if the process in `seen`
        leads now and uses another Ray."""
        if seen is None or not (fault := other_ray(self.executor.status(), seen)):
            return
        row = await self._store.leader()
        if row.term == seen.term and row.lease_until > row.at:
            raise StartRefused(fault)

    def term(self) -> Term | None:
        """Return the term that this process leads; None while it does not lead."""
        return self.candidate.term

    def seen(self, term: Term) -> LeaderSeen:
        """Return the status that this process publishes while it leads."""
        status, leader = dict(self.executor.status()), self.candidate.leader
        seen = LeaderSeen(
            term, self._name, self._follower.clock.now(), status, slots=self._slots.divided,
            lease_seconds=self.candidate.seconds_left(), release=__version__,
        )  # fmt: skip
        if leader is None:
            return seen
        fleet = None if leader.fleet is None else leader.fleet.seen
        return replace(seen, paused=leader.paused, silent=leader.silent(), fleet=fleet)

    def paused(self) -> PausedDetection | None:
        leader = self.candidate.leader
        return None if leader is None else leader.paused

    def forecasts(self) -> Sequence[Forecast]:
        leader = self.candidate.leader
        return () if leader is None else leader.planner.forecast_rounds.forecasts

    async def wind_up(self) -> None:
        await self.candidate.wind_up()

    def extension_rows(self) -> list[ExtensionRow]:
        return [
            ExtensionRow(running.name, running.delivered, running.failed, running.dropped)
            for running in self._extensions
        ]

    async def _stop_extensions(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(running.stop) for running in self._extensions))
        self._extensions = []

    async def close(self, *, stop_cluster: bool) -> None:
        await self._stop_extensions()
        await self.executor.close(stop_cluster=stop_cluster)
        for host in self._hosts:
            await host.close()
        for client in self._clients:
            await client.close()

    def _new_leader(self, leader_term: LeaderTerm) -> Leader:
        """Return the leader of a new term. It keeps no state of earlier terms."""
        follower, settings = self._follower, self._settings
        logs = LogKeeper(
            leader_term.term,
            follower.world,
            self._store,
            self._blobs,
            self.executor,
            follower.clock,
            boot_seconds,
            limit_bytes=settings.limits.log_bytes,
            inline_bytes=settings.limits.inline_bytes,
        )
        limits = settings.limits
        objects = TaskObjects(
            follower.world,
            self._store,
            self._blobs,
            self.executor,
            follower.clock,
            settings.retention.object_seconds,
            Quota(limits.tenant_object_bytes, limits.tenant_objects),
            limits.object_bytes,
        )
        return Leader(
            leader_term=leader_term,
            ticks=boot_seconds,
            world=follower.world,
            policy=self._policy,
            store=self._store,
            executor=self.executor,
            observer=Observer(
                follower.world,
                self._policy,
                self._blobs,
                inventory_rules_of(settings),
                settings.limits.inline_bytes,
                follower.progress,
                boot_seconds,
                {host.name: host.address for host in self._hosts},
                fleet_rules_of(settings).disk,
            ),
            dispatcher=self._dispatcher(),
            clock=follower.clock,
            new_fleet=self._new_fleet,
            logs=logs,
            objects=objects,
        )

    def _new_fleet(self, commit_seconds: Callable[[], float]) -> FleetKeeper:
        rules, disks = fleet_rules_of(self._settings), (self._settings.data_dir, self._settings.objects)
        keeper = FleetKeeper(
            rules,
            self._follower.world,
            self._policy,
            self._follower.clock,
            partial(host_use, disks),
            commit_seconds,
            self._store,
            self.last_fleet(),
            self._diagnose,
        )
        self.last_fleet = lambda: keeper.seen
        return keeper

    def _diagnose(self, fleet: FleetSeen) -> Iterable[Finding]:
        """Return the findings that the leader knows of. Findings of a gateway alone, such as a model server
        that it cannot reach, are left out."""
        leader, follower = self.candidate.leader, self._follower
        known = FleetKnown(self.executor.status(), has_leader=True, fleet=fleet)
        if leader is not None:
            paused = leader.paused
            since = None if paused is None else paused.since
            known = known._replace(late=leader.silent(), held_back=paused, held_back_since=since)
        return diagnose_fleet(follower.world, self._policy, known, follower.clock.now())

    def _dispatcher(self) -> Dispatcher:
        clock = self._follower.clock
        world = self._follower.world
        at_once = {given.name: given.loads_at_once for given in self._settings.triton.servers}
        dispatcher = ModelDispatcher(
            self._hosts,
            clock,
            boot_seconds,
            ModelDispatchRules(loads_at_once=at_once),
            wait_seconds=self._wait_seconds,
            have_let_go=self._have_let_go,
            watches=(
                partial(watch_model_use, world, self._in_use, clock, self._policy),
                partial(watch_left_servers, world, is_gone),
            ),
        )
        inferences = InferenceDispatcher(
            self._clients, clock, rules=self._settings.triton.batch, blobs=self._blobs
        )
        return Dispatcher(
            self._store,
            self._blobs,
            self.executor,
            world,
            clock,
            self._settings.entrypoints,
            dispatcher,
            inferences,
            self._runs.env_of,
            secrets_of(self._settings),
        )

    async def _have_let_go(self, claim: str) -> bool:
        if self._store.is_shared:
            return await gateways_have_let_go(self._store, self._follower.clock, claim)
        return self.let_go is None or claim in self.let_go()

    async def _in_use(self) -> ModelsInUse | None:
        if self._store.is_shared:
            return await models_in_use(self._store, self._follower.clock)
        return ModelsInUse(frozenset()) if self.in_use is None else self.in_use()

    def _on_reread(self, fault: LogShortened | LineageChanged) -> None:
        lost = isinstance(fault, LineageChanged) and fault.has_lost_commits
        self.candidate.end_term(str(fault), has_lost_commits=lost)

    def _on_events(self, events: Sequence[Event]) -> None:
        if self.candidate.leader is not None:
            self.candidate.leader.on_events(events)
            for running in self._extensions:
                running.offer(events)
