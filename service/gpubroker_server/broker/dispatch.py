"""Sends the orders of committed decisions. The order of a start carries the arguments and the checkpoint of
its run."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog
from msgspec.structs import replace

from gpubroker_server.broker.disk_passes import local_paths
from gpubroker_server.broker.inference_dispatch import InferenceDispatcher
from gpubroker_server.broker.model_dispatch import Hear, ModelDispatcher
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.demand import environment_of
from gpubroker_server.core.domain.device import DiskOrder
from gpubroker_server.core.domain.environment import EnvironmentState
from gpubroker_server.core.domain.leader_term import LeaderTerm
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.model_orders import DropOrder, InferOrder, ModelOrder
from gpubroker_server.core.domain.orders import (
    Ended,
    Ending,
    EnvironmentReported,
    Failure,
    Gone,
    Order,
    PrepareOrder,
    Report,
    StartOrder,
)
from gpubroker_server.core.domain.submission import (
    ENTRYPOINT_NOT_ALLOWED,
    SECRET_MISSING,
    EntrypointPatterns,
    is_entrypoint_allowed,
    named_patterns,
    secrets_named,
)
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Fence, TaskId
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.executor import Executor, RunPayload
from gpubroker_server.ports.secrets import SecretStore
from gpubroker_server.ports.store import (
    BlobCorrupt,
    BlobMissing,
    BlobStore,
    Clock,
    RunSpec,
    StoredCheckpoint,
    StoreUnavailable,
    TaskStore,
)

log = structlog.get_logger("gpubroker.dispatch")

Start = StartOrder | InferOrder
"""The orders that need the specification with which the task was submitted."""

Rows = Mapping[tuple[TaskId, Fence], Task]
"""The task of each claim, as the decision wrote it."""


class SecretMissing(Exception):
    """The tenant has deleted a secret that one of its tasks names."""

    def __init__(self, tenant: str, name: str) -> None:
        super().__init__(name)
        self.failure = Failure(
            SECRET_MISSING,
            f'tenant "{tenant}" had a secret "{name}" when the task was submitted and has not any more; set '
            f"it again with `gpubroker secrets set {name}`, and submit the task again",
        )


@dataclass(eq=False)
class Dispatcher:
    """Sends the orders of committed decisions. A start that cannot be made leads to a report that its run has
    ended."""

    store: TaskStore
    blobs: BlobStore
    executor: Executor
    world: World
    clock: Clock
    entrypoints: EntrypointPatterns
    """The entrypoints that are allowed now."""
    desk: ModelDispatcher | None = None
    """Dispatches the orders of leased models."""
    inferences: InferenceDispatcher | None = None
    """Dispatches queued inferences."""
    env_of: Callable[[Task, RunSpec], Mapping[str, str]] = lambda _task, _spec: {}
    """Returns the environment variables that a run gets besides those of its task."""
    secrets: SecretStore | None = None
    hear: Hear = lambda _: None
    """Takes reports that are made here after the orders were sent."""

    def __post_init__(self) -> None:
        self._specs: Mapping[TaskId, RunSpec] = {}
        """The specifications that `look_up` read last."""
        self._looks: set[asyncio.Task[None]] = set()

    async def look_up(self, decisions: Sequence[Decision]) -> None:
        """Read the specifications that the starts of these decisions need, while the decisions are committed.
        `send` reads those that are missing."""
        needed = Start | PrepareOrder
        starts = [order.task for d in decisions for order in d.orders if isinstance(order, needed)]
        if starts:
            with suppress(StoreUnavailable):
                self._specs = await self.store.specs(starts)

    async def send(self, committed: Sequence[Decision]) -> Sequence[Report]:
        """Send all orders in decision order. Returns reports about starts that could not be made. Raises
        StoreUnavailable if nothing could be sent."""
        orders = [order for decision in committed for order in decision.orders]
        starts = [order for order in orders if isinstance(order, Start) and not self._is_over(order)]
        rows = {(w.task.id, w.task.fence): w.task for decision in committed for w in decision.tasks}
        payloads, impossible = await self._payloads(starts, rows)
        ready = {(order.task, order.fence) for order in starts if order.task in payloads}
        sendable: list[Order] = []
        for order in orders:
            if isinstance(order, ModelOrder):
                if self.desk is not None:
                    self.desk.send(order)
            elif isinstance(order, InferOrder | DropOrder):
                self._send_inference(order, payloads)
            elif isinstance(order, DiskOrder):
                self._begin(self._look_at_disks(order))
            elif isinstance(order, PrepareOrder):
                self._begin(self._prepare(order, self._specs.get(order.task)))
            elif not isinstance(order, StartOrder) or (order.task, order.fence) in ready:
                sendable.append(order)
        if sendable:
            await self.executor.send(sendable, payloads)
        return impossible

    async def serve_models(self, leader_term: LeaderTerm, hear: Hear) -> None:
        """Pass on the reports of model servers, until cancelled."""
        async with asyncio.TaskGroup() as group:
            if self.desk is not None:
                group.create_task(self.desk.run(leader_term, hear))
            if self.inferences is not None:
                group.create_task(self.inferences.run(hear))

    def _send_inference(self, order: InferOrder | DropOrder, payloads: Mapping[TaskId, RunPayload]) -> None:
        assert self.inferences is not None, "inferences are admitted only with a server"
        if isinstance(order, DropOrder):
            self.inferences.drop(order)
        elif order.task in payloads:
            self.inferences.send(order, payloads[order.task].arguments)

    def _is_over(self, order: Start) -> bool:
        """True if the run ended between commit and dispatch: its agent must not start it."""
        task = self.world.tasks.get(order.task)
        return task is None or task.fence > order.fence or (task.fence == order.fence and not task.is_active)

    async def _payloads(
        self, starts: Sequence[Start], rows: Rows
    ) -> tuple[Mapping[TaskId, RunPayload], Sequence[Report]]:
        if not starts:
            return {}, ()
        missing = [order.task for order in starts if order.task not in self._specs]
        specs = {**self._specs, **(await self.store.specs(missing) if missing else {})}
        payloads: dict[TaskId, RunPayload] = {}
        impossible: list[Report] = []
        for order in starts:
            task = rows[order.task, order.fence]
            if (failure := self._withdrawn(specs[task.id])) is not None:
                impossible += self._never_started(order, failure)
                continue
            saved = await self.store.checkpoints(task.id) if task.checkpoint_at is not None else ()
            try:
                spec = await self._with_secrets(task.tenant, specs[task.id])
                payloads[task.id] = await self._payload(task, spec, saved)
            except SecretMissing as missing:
                impossible += self._never_started(order, missing.failure)
            except StoreUnavailable as fault:
                impossible.append(self._put_back(order, fault))
            except (BlobMissing, BlobCorrupt) as fault:
                message = f"the stored arguments cannot be used: {fault}; submit the task again"
                impossible += self._never_started(order, Failure("corrupt_order", message))
        return payloads, impossible

    def _begin(self, job: Coroutine[None, None, None]) -> None:
        """Do a job beside the cycles."""
        look = asyncio.create_task(job)
        self._looks.add(look)
        look.add_done_callback(self._looks.discard)

    async def _prepare(self, order: PrepareOrder, spec: RunSpec | None) -> None:
        """Send the order with the definition of its environment. If it cannot be read, the leader hears that
        the node does not have the environment, and orders it again."""
        try:
            if spec is None:
                spec = (await self.store.specs([order.task]))[order.task]
            definition = spec.environment
            assert definition is not None, "only tasks with an environment have it prepared"
            project = await self.blobs.get(definition.project) if definition.project else b""
        except (BlobMissing, BlobCorrupt, StoreUnavailable) as fault:
            log.error("an environment cannot be read", task=order.task, fault=str(fault))
            is_lost = not isinstance(fault, StoreUnavailable)
            state = EnvironmentState.FAILED if is_lost else None
            message = f"its project files cannot be read: {fault}; submit the task again" if is_lost else ""
            about = order.node, self.clock.now(), order.key, state
            self.hear([EnvironmentReported(*about, message=message)])
            return
        self.executor.prepare(order, definition, project)

    async def _look_at_disks(self, order: DiskOrder) -> None:
        """Send the order with the paths of the checkpoints from which tasks would resume. This runs beside
        the cycles, because it reads the checkpoints of every task from the database."""
        saved = [task.id for task in self.world.tasks.values() if task.checkpoint_at and not task.is_terminal]
        live: set[str] = set()
        try:
            for task in saved:
                for checkpoint in await self.store.checkpoints(task):
                    live |= local_paths(checkpoint.uri or "")
        except StoreUnavailable as fault:
            log.warning("the disks of a node are not looked at now", node=order.node, fault=str(fault))
            return
        self.executor.look_at_disks(replace(order, live=tuple(sorted(live))))

    def _withdrawn(self, spec: RunSpec) -> Failure | None:
        """Return the failure of a task whose entrypoint is no longer allowed, or None if it is allowed."""
        if (
            spec.kind != "entrypoint"
            or spec.upload
            or (spec.environment is not None and not spec.environment.name)
            or is_entrypoint_allowed(self.entrypoints, spec.entrypoint)
        ):
            return None
        allowed = named_patterns(self.entrypoints)
        return Failure(
            ENTRYPOINT_NOT_ALLOWED,
            f'"{spec.entrypoint}" was allowed when the task was submitted and is not any more; the operator '
            f"allows {allowed} (setting entrypoints). Have the operator allow it and submit it again, or "
            "submit another entrypoint",
        )

    async def _with_secrets(self, tenant: str, spec: RunSpec) -> RunSpec:
        """Return the specification with the secrets that its env names filled in. Raises StoreUnavailable and
        SecretMissing."""
        named = secrets_named(spec.env)
        if not named:
            return spec
        texts = {} if self.secrets is None else await self.secrets.read(tenant, named.values())
        for name in named.values():
            if name not in texts:
                raise SecretMissing(tenant, name)
        return replace(spec, env={**spec.env, **{variable: texts[name] for variable, name in named.items()}})

    async def _payload(self, task: Task, spec: RunSpec, saved: Sequence[StoredCheckpoint]) -> RunPayload:
        arguments = spec.arguments
        if spec.arguments_digest is not None:
            arguments = await self.blobs.get(spec.arguments_digest)
        state, uri = await self._newest_valid(task, saved)
        env = self.env_of(task, spec)
        return RunPayload(
            spec=replace(spec, env={**spec.env, **env}) if env else spec,
            arguments=arguments,
            resume_state=state,
            resume_uri=uri,
            attempt=task.fence,
            name=task.name,
            tenant=task.tenant,
            timeout_seconds=task.timeout_seconds,
            environment=environment_of(task.demand),
        )

    async def _newest_valid(
        self, task: Task, saved: Iterable[StoredCheckpoint]
    ) -> tuple[bytes | None, str | None]:
        """Return the bytes or the URI of the newest usable checkpoint. A checkpoint whose bytes are missing
        or damaged is skipped."""
        for checkpoint in saved:
            if checkpoint.uri is not None:
                return None, checkpoint.uri
            try:
                return await self.blobs.get(checkpoint.digest), None
            except (BlobMissing, BlobCorrupt) as fault:
                log.warning(
                    "checkpoint skipped; the run resumes from an older one or from the start",
                    task=task.id,
                    sequence=checkpoint.sequence,
                    digest=checkpoint.digest,
                    fault=str(fault),
                )
        return None, None

    def _put_back(self, order: Start, fault: StoreUnavailable) -> Report:
        """Return a report that the run never started, so that the task is planned again later. Other starts
        do not wait for its bytes."""
        log.error("run not started: what it needs cannot be read now", task=order.task, fault=str(fault))
        return Gone(order.task, order.fence, self.clock.now(), Proof.NEVER_STARTED, rank=order.rank)

    def _never_started(self, order: Start, failure: Failure) -> list[Report]:
        now = self.clock.now()
        log.error("run cannot be started", task=order.task, fault=failure.message)
        return [
            Ended(order.task, order.fence, now, Ending.FAILED, failure=failure, rank=order.rank),
            Gone(order.task, order.fence, now, Proof.NEVER_STARTED, rank=order.rank),
        ]
