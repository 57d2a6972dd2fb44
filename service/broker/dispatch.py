"""From committed decisions to orders on their way, each start with what the run needs attached."""

from collections.abc import Iterable, Mapping, Sequence

import structlog

from service.core.orders import Ended, Ending, Failure, Gone, Order, Report, StartOrder
from service.core.plan import Decision
from service.core.task import Task
from service.core.units import TaskId
from service.core.world import World
from service.ports import (
    BlobCorrupt,
    BlobMissing,
    BlobStore,
    Clock,
    Executor,
    RunPayload,
    RunSpec,
    TaskStore,
)

log = structlog.get_logger("gpubroker.dispatch")


class Dispatcher:
    """Sends the orders of committed decisions. What cannot be sent comes back as a report of its end."""

    def __init__(
        self, store: TaskStore, blobs: BlobStore, executor: Executor, world: World, clock: Clock
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._executor = executor
        self._world = world
        self._clock = clock

    async def send(self, committed: Iterable[Decision]) -> Sequence[Report]:
        """Send all orders in decision order. Returns reports about starts that could not be made."""
        orders = [order for decision in committed for order in decision.orders]
        if not orders:
            return ()
        starts = [order for order in orders if isinstance(order, StartOrder)]
        payloads, impossible = await self._payloads(starts)
        unsent = {report.task for report in impossible if isinstance(report, Ended)}
        sendable = [order for order in orders if not _is_start_of(order, unsent)]
        await self._executor.send(sendable, payloads)
        return impossible

    async def _payloads(
        self, starts: Sequence[StartOrder]
    ) -> tuple[Mapping[TaskId, RunPayload], Sequence[Report]]:
        if not starts:
            return {}, ()
        specs = await self._store.specs([order.task for order in starts])
        payloads: dict[TaskId, RunPayload] = {}
        impossible: list[Report] = []
        for order in starts:
            task = self._world.tasks.get(order.task)
            if task is None or task.fence != order.fence:
                continue  # it ended between commit and dispatch; the agent must not hear of it
            try:
                payloads[order.task] = await self._payload(task, specs[order.task])
            except (BlobMissing, BlobCorrupt) as fault:
                impossible += self._never_started(order, fault)
        return payloads, impossible

    async def _payload(self, task: Task, spec: RunSpec) -> RunPayload:
        arguments = spec.arguments
        if spec.arguments_digest is not None:
            arguments = await self._blobs.get(spec.arguments_digest)
        state, uri = await self._newest_valid_checkpoint(task)
        return RunPayload(
            spec=spec,
            arguments=arguments,
            resume_state=state,
            resume_uri=uri,
            attempt=task.fence,
            name=task.name,
            tenant=task.tenant,
            timeout_seconds=task.timeout_seconds,
        )

    async def _newest_valid_checkpoint(self, task: Task) -> tuple[bytes | None, str | None]:
        """A checkpoint whose bytes no longer match is passed over for the one before it."""
        if task.checkpoint_at is None:
            return None, None
        for saved in await self._store.checkpoints(task.id):
            if saved.uri is not None:
                return None, saved.uri
            try:
                return await self._blobs.get(saved.digest), None
            except (BlobMissing, BlobCorrupt) as fault:
                log.warning(
                    "checkpoint passed over; the run resumes from an older one or from the start",
                    task=task.id,
                    sequence=saved.sequence,
                    digest=saved.digest,
                    fault=str(fault),
                )
        return None, None

    def _never_started(self, order: StartOrder, fault: Exception) -> list[Report]:
        now = self._clock.now()
        failure = Failure(
            "corrupt_order", f"the stored arguments cannot be used: {fault}; submit the task again"
        )
        log.error("run cannot be started", task=order.task, fault=str(fault))
        return [
            Ended(order.task, order.fence, now, Ending.FAILED, failure=failure, rank=order.rank),
            Gone(order.task, order.fence, now, "never_started", rank=order.rank),
        ]


def _is_start_of(order: Order, tasks: set[TaskId]) -> bool:
    return isinstance(order, StartOrder) and order.task in tasks
