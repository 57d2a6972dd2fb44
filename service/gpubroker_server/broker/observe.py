"""Observes what happened since the last cycle: reports, requests and deadlines. The core turns them into
decisions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import structlog
from msgspec.structs import replace

from gpubroker_server.broker.arrays import Arrays, with_pages_stored
from gpubroker_server.broker.client_requests import ClientRequests
from gpubroker_server.broker.disk_passes import DiskPasses
from gpubroker_server.core.control.disk_guard import DiskGuard
from gpubroker_server.core.domain.decisions import Decision, Outcome
from gpubroker_server.core.domain.device import DeviceSample, DiskReport, NodeSample
from gpubroker_server.core.domain.model_orders import ModelsInUse, ServerGone, ServerIndex
from gpubroker_server.core.domain.orders import (
    Checkpointed,
    Ended,
    Ending,
    EnvironmentReported,
    Failure,
    Gone,
    Heartbeat,
    ItemsReported,
    Loaded,
    Logged,
    NodeLost,
    NodeReport,
    NodesListed,
    Progressed,
    Report,
    Sampled,
    Stacked,
)
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.progress import Progress, first_progress
from gpubroker_server.core.domain.task import Move
from gpubroker_server.core.domain.units import DeviceKey, Fence, Instant, NodeName, TaskId
from gpubroker_server.core.lifecycle import (
    deadlines,
    environments,
    gpu_closures,
    model_adoption,
    model_lifecycle,
    model_turns,
    quarantine,
    runs,
    worker_sets,
)
from gpubroker_server.core.lifecycle.learning import ModelMeter, learn
from gpubroker_server.core.lifecycle.quarantine import QuarantineProbe, SampleRequests
from gpubroker_server.core.lifecycle.reconcile import InventoryRules, never_joined, reconcile
from gpubroker_server.core.lifecycle.silent_nodes import (
    NODE_PATIENCE_SECONDS,
    HeartbeatMonitor,
    nodes_without_answer,
)
from gpubroker_server.core.lifecycle.stopping import overuse_decisions
from gpubroker_server.core.lifecycle.worker_sets import Autoscaler
from gpubroker_server.core.planning import inferences as inference_admission
from gpubroker_server.core.planning.draining import ask_to_leave
from gpubroker_server.core.planning.fragmentation import ScatteredWatch
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import BlobStore, BlobTooLarge, ReadTicks

log = structlog.get_logger("gpubroker.observe")

_ENDS_OF_A_RUN = frozenset(
    f"task.{move}" for move in (Move.REQUEUED, Move.SUCCEEDED, Move.FAILED, Move.CANCELLED, Move.EXPIRED)
)
_UNSTORABLE = Failure(
    "unstorable", "a value that the run reported cannot be stored in the database, such as a text with a NUL"
)


def forget_ended(progress: dict[TaskId, Any], events: Iterable[Event]) -> None:
    """Forget the progress of runs that have ended."""
    for event in events if progress else ():
        if event.kind in _ENDS_OF_A_RUN:
            progress.pop(TaskId(event.key), None)


def without_values(reports: Sequence[Report], task: str, now: Instant) -> list[Report]:
    """Return the reports about a task without the values that the database refused: checkpoints and results
    of items are left out, and the end of the run becomes a failure. Return nothing if the reports contain no
    such values."""
    own_reports = [report for report in reports if getattr(report, "task", None) == task]
    plain: list[Report] = []
    for report in own_reports:
        match report:
            case Checkpointed() | ItemsReported():
                continue
            case Ended() if report.failure is not _UNSTORABLE:
                failed = Ended(report.task, report.fence, now, Ending.FAILED, failure=_UNSTORABLE)
                plain.append(replace(failed, rank=report.rank))
            case _:
                plain.append(report)
    return [] if plain == own_reports else plain


class _Rejected(Exception):
    """The bytes of `report` cannot be stored. `instead` is the report that replaces it, if there is one."""

    def __init__(self, report: Report, instead: Report | None = None) -> None:
        self.report = report
        self.instead = instead


@dataclass(eq=False)
class Observer:
    """Turns reports, requests and deadlines into decisions. The progress of runs is kept in memory only."""

    world: World
    policy: Policy
    blobs: BlobStore
    inventory: InventoryRules
    inline_bytes: int
    progress: dict[TaskId, Progress]
    ticks: ReadTicks
    servers: Mapping[str, str] | None = None
    """The addresses of all servers of models, by name; None if they are unknown."""
    guard: InitVar[DiskGuard | None] = None

    def __post_init__(self, guard: DiskGuard | None) -> None:
        self._watch: deadlines.ObservationWindow | None = None
        self.heartbeats = HeartbeatMonitor(self.policy)
        self._quarantine_probe = QuarantineProbe()
        self._sample_requests = SampleRequests()
        self._model_meter = ModelMeter()
        self._scattered = ScatteredWatch()
        self._autoscaler = Autoscaler()
        self._loads: dict[TaskId, Loaded] = {}
        """The loads that the present runs of workers last reported."""
        self._named_unknown = False
        self._left_behind: frozenset[tuple[TaskId, Fence]] | None = None
        """The claims of inferences that an earlier leader had sent; None until `on_time` has looked for
        them."""
        self._requests = ClientRequests(self.world, self.policy, self.blobs)
        self._disks = DiskPasses(self.world, self.policy, guard or DiskGuard(), self.blobs)
        self.to_ask: list[NodeName] = []
        """Nodes that were given up, and nodes whose reports may be lost. The leader asks them for their
        runs."""

    async def on_reports(
        self, reports: Sequence[Report], now: Instant, arrays: Arrays | None = None
    ) -> list[Decision]:
        """Return the decisions that one batch of reports leads to. `inbox.next_batch` makes the batches."""
        about_runs: list[Report] = []
        decisions: list[Decision] = []
        after_gone: dict[DeviceKey, DeviceSample] = {}
        measured: dict[NodeName, NodeSample] = {}
        answered: set[NodeName] = set()
        lost = [report for report in reports if isinstance(report, NodeLost)]
        given_up = self._given_up(self.heartbeats.report_dead(lost, self.world, self.ticks(), now))
        for report in reports:
            match report:
                case Heartbeat() | Logged() | NodesListed():
                    pass
                case NodeLost():
                    if report in given_up:
                        about_runs.append(report)
                case Sampled():
                    self.world.measure(report.samples)
                case NodeSample():
                    self.world.measure((), [report])
                    measured[report.node] = report
                case Gone():
                    after_gone |= {sample.device: sample for sample in report.samples}
                    about_runs.append(report)
                case Progressed():
                    self._on_progress(report)
                case Loaded():
                    self._on_load(report)
                case ServerIndex():
                    decisions += model_lifecycle.seen(self.world, report, now, self.policy)
                case ServerGone():
                    decisions += model_adoption.server_gone(self.world, report.process)
                case ModelsInUse():
                    decisions += model_turns.turns(self.world, report, now, self.policy)
                case DiskReport():
                    decisions += await self._disks.answered(report, now)
                case EnvironmentReported():
                    pass
                case Stacked():
                    decisions += await self._requests.answered(report)
                case NodeReport():
                    self._log_answer(report)
                    self._name_strangers(report)
                    decisions += reconcile(self.world, report, now, self.policy, self.inventory)
                    answered.add(report.node.name)
                case _:
                    about_runs.append(report)
        prepared = [report for report in reports if isinstance(report, EnvironmentReported)]
        decisions += environments.seen(self.world, prepared, now) if prepared else []
        for node, sample in measured.items():
            # The rows of a node that has just answered may change now; its next sample comes soon.
            if node not in answered:
                decisions += gpu_closures.by_health(self.world, sample, now)
        # These samples were taken after the processes had ended, so the memory of those is not taken for
        # foreign. The last sample of a device holds for all runs that have left the device.
        self.world.measure(after_gone.values())
        decisions += inference_admission.check_failed_models(self.world, about_runs, self.policy, now)
        return decisions + await self._on_runs(about_runs, now, arrays)

    def _name_strangers(self, seen: NodeReport) -> None:
        for task, _, _ in seen.runs:
            if task not in self.world.tasks:
                log.warning(
                    "ending a run that the database does not know: it began after the backup that was "
                    "restored, or its task was deleted",
                    task=task,
                    node=seen.node.name,
                )

    async def _on_runs(
        self, reports: Sequence[Report], now: Instant, arrays: Arrays | None
    ) -> list[Decision]:
        """Turn reports into decisions, and store the bytes that belong to them. A report whose bytes the
        blob store refuses is replaced or dropped."""
        while True:
            drafts = await arrays.drafts(reports) if arrays is not None else {}
            applied = runs.apply_reports(self.world, reports, now, self.policy, drafts)
            decisions = learn(self.world, applied, now)
            try:
                decisions = await with_pages_stored(decisions, self.blobs, self.inline_bytes)
                return [await self._with_blobs(decision, reports) for decision in decisions]
            except _Rejected as refused:
                replaced = [refused.instead if report is refused.report else report for report in reports]
                reports = [report for report in replaced if report is not None]

    def hear(self, reports: Iterable[Report]) -> None:
        """Note that the nodes of these reports are alive, before the reports themselves are applied."""
        heard_at = self.ticks()
        for report in reports:
            if isinstance(report, Heartbeat | Sampled):
                self.heartbeats.heard(report.node, heard_at)
            elif isinstance(report, NodeReport):
                self.heartbeats.heard(report.node.name, heard_at)
            elif isinstance(report, NodesListed):
                self.heartbeats.listed(report.nodes, self.world, heard_at)

    def on_requests(self, now: Instant) -> list[Decision]:
        for request in self.world.requests.values():
            if request.what == "resume":
                self.heartbeats.resume(request.fields["nodes"])
        return [*self._requests.carry_out(now), *self._disks.carry_out(now)]

    def on_time(self, now: Instant, *, listening: bool = True) -> list[Decision]:
        """Return the decisions that are due at this time. `listening` is True if reports of agents reach this
        leader, as far as it knows."""
        if lost := self._silent(now, listening=listening):
            return runs.apply_reports(self.world, lost, now, self.policy)
        self.to_ask += self._quarantine_probe.due(self.world, self.ticks())
        decisions = deadlines.due(self.world, now, self.policy, self._watch)
        decisions += quarantine.removed(self.world)
        decisions += model_lifecycle.due(self.world, now)
        if self.servers is not None:
            decisions += model_adoption.follow_settings(self.world, self.servers, now)
        self._watch = deadlines.extend_window(self._watch, now)
        self._name_unknown_nodes(self._watch)
        decided = {decision.subject for decision in decisions}
        # Without servers there is nothing to measure, and `measure` is costly: it looks at each GPU.
        if self.servers != {}:
            decisions += self._model_meter.measure(self.world, now, decided)
        more = [*overuse_decisions(self.world, now, self.policy), *self._about_inferences(now)]
        more += ask_to_leave(self.world, self.policy, now)
        more += worker_sets.due(self.world, self._loads, self._autoscaler, now)
        more += environments.due(self.world, now) if self.world.unprepared else []
        more += self._scattered_now(now)
        more += self._disks.due(now)
        return [*decisions, *(decision for decision in more if decision.subject not in decided)]

    def _scattered_now(self, now: Instant) -> list[Decision]:
        decisions = self._scattered.look(self.world, self.policy, now)
        for notice in (notice for decision in decisions for notice in decision.notices):
            if notice.fields:
                log.warning(
                    "free memory is in pieces too small for what most tasks wait for", **notice.fields
                )
            else:
                log.info("free memory is no longer in pieces too small for what most tasks wait for")
        return decisions

    def to_measure(self) -> list[NodeName]:
        """Return the nodes that should measure their devices now."""
        return self._sample_requests.due(self.world, self.ticks())

    def _name_unknown_nodes(self, watch: deadlines.ObservationWindow) -> None:
        """Warn once of nodes in the settings that have not joined in time. Otherwise a misspelled name would
        go unnoticed."""
        if not self._named_unknown and watch.last - watch.since >= NODE_PATIENCE_SECONDS:
            self._named_unknown = True
            for name in never_joined(self.world, self.inventory):
                known = f"known nodes: {', '.join(sorted(self.world.nodes))}"
                log.warning("the settings name a node that never joined", node=name, fault=known)

    def _about_inferences(self, now: Instant) -> list[Decision]:
        if self._left_behind is None:
            self._left_behind = inference_admission.claims_at_takeover(self.world)
        return [
            *inference_admission.requeue_claims(self.world, self._left_behind, now, self.policy),
            *inference_admission.keep_models_wanted(self.world, self.policy, now),
            *inference_admission.admissions(self.world, self.policy, now),
        ]

    def _silent(self, now: Instant, *, listening: bool) -> list[NodeLost]:
        checked_at = self.ticks()
        was_paused = self.heartbeats.paused
        lost = self.heartbeats.check(self.world, checked_at, now, listening=listening)
        since = deadlines.extend_window(self._watch, now).since
        if unheard := nodes_without_answer(self.world, since, now):
            lost += self.heartbeats.report_dead(unheard, self.world, checked_at, now)
        paused = self.heartbeats.paused
        if paused is not None and was_paused is None:
            log.warning("nodes are silent and are not given up", fault=paused.message)
        elif paused is None and was_paused is not None:
            log.info("silent nodes are given up again")
        return self._given_up(lost)

    def _log_answer(self, report: NodeReport) -> None:
        known = self.world.nodes.get(report.node.name)
        if known is None or not known.ready:
            log.info("a node answers", node=report.node.name)

    def _given_up(self, lost: list[NodeLost]) -> list[NodeLost]:
        for report in lost:
            log.warning("a node is given up", node=report.node, fault=report.why)
            self.to_ask.append(report.node)
        return lost

    def _on_progress(self, report: Progressed) -> None:
        task = self.world.tasks.get(report.task)
        if task is not None and task.fence == report.fence and task.is_active:
            before = self.progress.get(report.task)
            follow = first_progress if before is None else before.followed_by
            self.progress[report.task] = follow(report.at, report.fraction, report.message)

    def _on_load(self, report: Loaded) -> None:
        if report.task in self.world.tasks:
            self._loads[report.task] = report
            message = (
                f"{report.running} calls under way, {report.waiting} waiting, CPU {report.cpu_percent:.0f} %"
            )
            self._on_progress(Progressed(report.task, report.fence, report.at, None, message, report.rank))

    def on_events(self, events: Iterable[Event]) -> None:
        forget_ended(self.progress, events)
        forget_ended(self._loads, events)

    async def _with_blobs(self, decision: Decision, reports: Sequence[Report]) -> Decision:
        """Return the decision with its large values replaced by digests of stored blobs. The bytes are
        stored before the row is written, so a committed row never names a blob that is not on disk. Raises
        _Rejected and StoreUnavailable."""
        if decision.checkpoint is not None and decision.checkpoint.data is not None:
            await self._store_checkpoint(decision.checkpoint, decision.checkpoint.data)
        outcome = decision.outcome
        if outcome is None or outcome.result is None or len(outcome.result) <= self.inline_bytes:
            return decision
        try:
            digest = await self.blobs.put(outcome.result, owner=outcome.task)
        except BlobTooLarge as fault:
            raise _too_large(reports, outcome, fault) from None
        return replace(decision, outcome=replace(outcome, result=None, result_digest=digest))

    async def _store_checkpoint(self, checkpoint: Checkpointed, data: bytes) -> None:
        """Store the bytes of the checkpoint. If they are refused, the previous checkpoint stays the newest.
        Raises _Rejected."""
        try:
            digest = await self.blobs.put(data, owner=checkpoint.task)
        except BlobTooLarge as fault:
            log.warning(
                "checkpoint refused", task=checkpoint.task, sequence=checkpoint.sequence, fault=str(fault)
            )
            raise _Rejected(checkpoint) from None
        if digest != checkpoint.digest:
            log.warning(
                "checkpoint refused: its bytes do not have the digest taken where it was saved",
                task=checkpoint.task,
                sequence=checkpoint.sequence,
                expected=checkpoint.digest,
                found=digest,
            )
            raise _Rejected(checkpoint)


def _too_large(reports: Iterable[Report], outcome: Outcome, fault: BlobTooLarge) -> _Rejected:
    """Return the rejection of a report whose run succeeded with a result that is too large to be stored."""
    failure = Failure("result_too_large", f"{fault}; return less, or raise limits.result_bytes")
    for report in reports:
        if isinstance(report, Ended) and report.result is outcome.result:
            return _Rejected(report, replace(report, ending=Ending.FAILED, result=None, failure=failure))
    raise AssertionError(f"the result of {outcome.task} came with no report")
