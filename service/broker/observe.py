"""What came in since the last cycle: reports, requests and deadlines, turned into decisions by the core."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import structlog

from service.core import deadlines, reconcile, requests, runs
from service.core.orders import Checkpointed, Gone, NodeSeen, Progressed, Report, Sampled
from service.core.plan import Decision, Outcome
from service.core.policy import Policy
from service.core.units import Instant, Mib, TaskId
from service.core.world import World
from service.ports import BlobStore, Progress

log = structlog.get_logger("gpubroker.observe")


@dataclass(frozen=True, slots=True)
class InventoryRules:
    """How devices that agents report are entered."""

    cluster: str
    reserve_mb: int


def next_batch(heard: Iterable[Report]) -> list[Report]:
    """The reports up to the next NodeSeen, or that one alone.

    What an agent says of all its runs holds in its place between the other reports: what came before must
    be committed when it is read, and what came after must not.
    """
    batch: list[Report] = []
    for report in heard:
        if isinstance(report, NodeSeen):
            return batch or [report]
        batch.append(report)
    return batch


class Observer:
    """Turns what was heard into decisions. Keeps progress in memory; it is no event."""

    def __init__(
        self,
        world: World,
        policy: Policy,
        blobs: BlobStore,
        inventory: InventoryRules,
        inline_bytes: int,
        progress: dict[TaskId, Progress],
    ) -> None:
        self._world = world
        self._policy = policy
        self._blobs = blobs
        self._inventory = inventory
        self._inline_bytes = inline_bytes
        self._progress = progress
        self._watch: deadlines.Watch | None = None

    async def on_reports(self, reports: Sequence[Report], now: Instant) -> list[Decision]:
        """Of one batch as `next_batch` cuts it."""
        about_runs: list[Report] = []
        decisions: list[Decision] = []
        for report in reports:
            match report:
                case Sampled():
                    self._world.measure(report.samples)
                case Gone():
                    # Measured after its process was gone, so that nobody takes what it used for a stranger's.
                    self._world.measure(report.samples)
                    about_runs.append(report)
                case Progressed():
                    self._on_progress(report)
                case NodeSeen():
                    decisions += reconcile.reconcile(
                        self._world,
                        report,
                        now,
                        self._policy,
                        cluster=self._inventory.cluster,
                        reserve_mb=Mib(self._inventory.reserve_mb),
                    )
                case _:
                    about_runs.append(report)
        decisions += runs.react(self._world, about_runs, now, self._policy)
        return [await self._with_blobs(decision) for decision in decisions]

    def on_requests(self, now: Instant) -> list[Decision]:
        return [
            requests.carry_out(self._world, request, now) for request in list(self._world.requests.values())
        ]

    def on_time(self, now: Instant) -> list[Decision]:
        decisions = deadlines.due(self._world, now, self._policy, self._watch)
        self._watch = deadlines.keep_watch(self._watch, now)
        return decisions

    def _on_progress(self, report: Progressed) -> None:
        task = self._world.tasks.get(report.task)
        if task is not None and task.fence == report.fence and task.is_active:
            self._progress[report.task] = Progress(report.at, report.fraction, report.message)

    async def _with_blobs(self, decision: Decision) -> Decision:
        """Bytes first, row after: a committed row never names an object that is not on disk."""
        if decision.checkpoint is not None and decision.checkpoint.data is not None:
            decision = replace(decision, checkpoint=await self._stored_checkpoint(decision.checkpoint))
        outcome = decision.outcome
        if outcome is not None and outcome.result is not None and len(outcome.result) > self._inline_bytes:
            decision = replace(decision, outcome=await self._stored_outcome(outcome))
        return decision

    async def _stored_checkpoint(self, checkpoint: Checkpointed) -> Checkpointed | None:
        """None if the bytes changed on their way: the checkpoint before it stays the newest."""
        assert checkpoint.data is not None
        digest = await self._blobs.put(checkpoint.data, owner=checkpoint.task)
        if digest == checkpoint.digest:
            return checkpoint
        log.warning(
            "checkpoint refused: its bytes do not have the digest taken where it was saved",
            task=checkpoint.task,
            sequence=checkpoint.sequence,
            expected=checkpoint.digest,
            found=digest,
        )
        return None

    async def _stored_outcome(self, outcome: Outcome) -> Outcome:
        assert outcome.result is not None
        digest = await self._blobs.put(outcome.result, owner=outcome.task)
        return replace(outcome, result=None, result_digest=digest)
