"""The task store in memory: the same guards and the same log as in SQL. Nothing survives the process."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from operator import gt, lt

from gpubroker_server.adapters.memory.store_parts import PagesInMemory, StandingInMemory, TokensAndObjects
from gpubroker_server.core.domain.decisions import (
    Decision,
    Outcome,
    Request,
    device_delta_mb,
    tenant_delta_mb,
)
from gpubroker_server.core.domain.device import Device, Node
from gpubroker_server.core.domain.estimates import Sketch, SketchKey
from gpubroker_server.core.domain.leader_term import LeaderRow
from gpubroker_server.core.domain.lease import Lease, LeaseState, Pledge
from gpubroker_server.core.domain.policy import HALF_LIFE_SECONDS, Cutoffs
from gpubroker_server.core.domain.submission import EXTERNAL_KIND as EXTERNAL
from gpubroker_server.core.domain.submission import WORKER_LABELS, KnownKey
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import (
    DeviceKey,
    Instant,
    NodeName,
    Position,
    Seconds,
    TaskId,
    Term,
)
from gpubroker_server.core.world.events import Event, NewEvent, events_of, requested, submitted, task_of
from gpubroker_server.core.world.phases import STATE_EVENTS
from gpubroker_server.core.world.tenant_accounts import Accounts
from gpubroker_server.ports.store import (
    BatchSubmission,
    CommitVerdict,
    EventListener,
    RunSpec,
    Snapshot,
    StoredCheckpoint,
    StoredResult,
    StoredState,
    Submission,
    SubmitOutcome,
    SubmitVerdict,
    TaskFilter,
    TaskRecord,
)

_CHECKPOINTS_KEPT = 3


class MemoryStore(TokensAndObjects, PagesInMemory, StandingInMemory):
    """A TaskStore for one event loop: no call awaits anything, so each is atomic."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        TokensAndObjects.__init__(self, now)
        PagesInMemory.__init__(self)
        StandingInMemory.__init__(self)
        self._listeners: list[EventListener] = []
        self._fault: Exception | None = None
        self._tasks: dict[TaskId, Task] = {}
        self._specs: dict[TaskId, RunSpec] = {}
        self._keys: dict[tuple[str, str], tuple[TaskId, str]] = {}
        self._batch_answers: dict[TaskId, str] = {}
        self._leases: dict[str, Lease] = {}
        self._pledges: dict[str, Pledge] = {}
        self._devices: dict[DeviceKey, Device] = {}
        self._leased_mb: Counter[str] = Counter()
        self._nodes: dict[NodeName, Node] = {}
        self._requests: dict[str, Request] = {}
        self._outcomes: dict[TaskId, Outcome] = {}
        self._checkpoints: dict[TaskId, dict[tuple[int, int], StoredCheckpoint]] = {}
        self._finished: Counter[tuple[str, TaskState]] = Counter()
        self._estimates: dict[SketchKey, Sketch] = {}
        self._usage = Accounts(HALF_LIFE_SECONDS)
        self._pruned = 0
        """How many of the first events were removed."""
        self._log: list[tuple[Event, TaskId | None]] = []

    def listen(self, listener: EventListener) -> None:
        self._listeners.append(listener)

    async def submit(self, submission: Submission) -> SubmitOutcome:
        self._check_listeners()
        task = submission.task
        if task.state is not TaskState.PENDING or task.version != 1:
            raise ValueError(f"task {task.id} is {task.state} in version {task.version}; submit a new one")
        if submission.idempotency_key is not None:
            key = (task.tenant, submission.idempotency_key)
            first, body_hash = self._keys.setdefault(key, (task.id, submission.body_hash))
            if body_hash != submission.body_hash:
                return SubmitOutcome(SubmitVerdict.KEY_REUSED, first)
            if first != task.id:
                return SubmitOutcome(SubmitVerdict.DUPLICATE, first)
        if task.id not in self._tasks and (holder := self._holder(task)) is not None:
            return SubmitOutcome(SubmitVerdict.DUPLICATE, holder)
        if task.id not in self._tasks:
            self._tasks[task.id] = task
            self._specs[task.id] = submission.spec
            self._append([submitted(task)])
        return SubmitOutcome(SubmitVerdict.ACCEPTED, task.id)

    def _holder(self, task: Task) -> TaskId | None:
        """The task that has, or waits for, the same residency."""
        if task.model is None:
            return None
        others = (other for other in self._tasks.values() if other.model and not other.is_terminal)
        return next((o.id for o in others if o.model and o.model.home == task.model.home), None)

    async def submit_batch(self, batch: BatchSubmission) -> SubmitOutcome:
        first, *others = batch.submissions
        named = replace(first, idempotency_key=batch.idempotency_key, body_hash=batch.body_hash)
        outcome = await self.submit(named)
        if outcome.verdict is SubmitVerdict.ACCEPTED:
            for other in others:
                await self.submit(other)
            self._batch_answers[first.task.id] = batch.answer
            await self.request(*batch.requests)
        return outcome

    async def known_key(self, tenant: str, key: str) -> KnownKey | None:
        known = self._keys.get((tenant, key))
        return None if known is None else KnownKey(*known)

    async def objects_of_open_tasks(self) -> Collection[tuple[str, str]]:
        open_tasks = [task for task in self._tasks.values() if not task.is_terminal]
        return {(task.tenant, id) for task in open_tasks for id in self._specs[task.id].objects}

    async def batch_answer(self, first: TaskId) -> str:
        return self._batch_answers.get(first, "")

    async def request(self, *requests: Request) -> None:
        self._check_listeners()
        new = [request for request in requests if request.id not in self._requests]
        self._requests |= {request.id: request for request in new}
        self._append(map(requested, new))

    async def take_term(
        self, holder: str, ttl_seconds: Seconds, *, instead_of: LeaderRow, has_lost_commits: bool = False
    ) -> Term | None:
        self._check_listeners()
        return await super().take_term(
            holder, ttl_seconds, instead_of=instead_of, has_lost_commits=has_lost_commits
        )

    async def commit(self, term: Term, decisions: Sequence[Decision]) -> Sequence[CommitVerdict]:
        self._check_listeners()
        self._require(term)
        at = Instant(self._now())
        verdicts: list[CommitVerdict] = []
        new: list[NewEvent] = []
        for decision in decisions:
            verdict = self._judge(decision)
            if verdict is CommitVerdict.COMMITTED:
                self._write(decision)
                for tenant, mb in tenant_delta_mb(decision).items():
                    self._usage.change(tenant, mb, at)
                new += events_of(decision)
            verdicts.append(verdict)
        self._append(new, at)
        return verdicts

    def _judge(self, decision: Decision) -> CommitVerdict:
        for write in decision.tasks:
            row = self._tasks.get(write.task.id)
            if row is None or row.version != write.task.version - 1:
                return CommitVerdict.STALE
        for lease in decision.leases:
            known = self._leases.get(lease.key)
            if (known.version if known is not None else 0) != lease.version - 1:
                return CommitVerdict.STALE
        for written in decision.pledges:
            if written.end is not None and written.pledge.key not in self._pledges:
                return CommitVerdict.STALE
        if self.has_pages(decision.items):
            return CommitVerdict.STALE
        return CommitVerdict.COMMITTED if self._fits(decision) else CommitVerdict.REFUSED

    def _fits(self, decision: Decision) -> bool:
        """A second check below the ledger: a device has leases from 0 up to its physical memory."""
        physical = {device.key: device.physical_mb for device in decision.devices}
        delta = device_delta_mb(decision)
        for key in {*physical, *delta}:
            known = self._devices.get(DeviceKey(key))
            whole = physical.get(DeviceKey(key), known.physical_mb if known is not None else None)
            if whole is None or not 0 <= self._leased_mb[key] + delta.get(key, 0) <= whole:
                return False
        return True

    def _write(self, decision: Decision) -> None:
        self._nodes.update((node.name, node) for node in decision.nodes)
        self._devices.update((device.key, device) for device in decision.devices)
        for key, mb in device_delta_mb(decision).items():
            self._leased_mb[key] += mb
        for write in decision.tasks:
            self._tasks[write.task.id] = write.task
            if write.task.is_terminal:
                self._finished[write.task.tenant, write.task.state] += 1
        self._leases.update((lease.key, lease) for lease in decision.leases)
        for written in decision.pledges:
            if written.end is None:
                self._pledges[written.pledge.key] = written.pledge
            else:
                del self._pledges[written.pledge.key]
        if decision.outcome is not None:
            self._outcomes[decision.outcome.task] = decision.outcome
        self._keep_checkpoint(decision)
        self.keep_pages(decision.items)
        for request in decision.requests_done:
            self._requests.pop(request, None)
        self.keep_standing(decision)
        for lesson in decision.lessons:
            self._estimates.pop(lesson.topic, None)
            self._estimates[lesson.topic] = lesson.sketch
        self.audited += decision.audit
        for topic in decision.forgotten:
            self._estimates.pop(topic, None)

    def _keep_checkpoint(self, decision: Decision) -> None:
        saved = decision.checkpoint
        if saved is None:
            return
        size_bytes = len(saved.data) if saved.data is not None else 0
        row = StoredCheckpoint(saved.sequence, saved.at, saved.digest, size_bytes, saved.uri)
        kept = {**self._checkpoints.get(saved.task, {}), (saved.fence, saved.sequence): row}
        newest = sorted(kept, reverse=True)[:_CHECKPOINTS_KEPT]
        self._checkpoints[saved.task] = {key: kept[key] for key in newest}

    def _append(self, new: Iterable[NewEvent], at: Instant | None = None) -> None:
        at = Instant(self._now()) if at is None else at
        events = [
            line.at(Position(position), at) for position, line in enumerate(new, start=len(self._log) + 1)
        ]
        if not events:
            return
        self._log += [(event, task_of(event)) for event in events]
        try:
            for listener in self._listeners:
                listener(events)
        except Exception as fault:
            self._fault = fault
            raise

    def _check_listeners(self) -> None:
        if self._fault is not None:
            raise self._fault

    async def snapshot(self) -> Snapshot:
        leases = [lease for lease in self._leases.values() if lease.state is not LeaseState.RELEASED]
        holders = {lease.holder for lease in leases}
        return Snapshot(
            position=Position(len(self._log)),
            lineage=self._lineage,
            at=Instant(self._now()),
            tasks=[task for task in self._tasks.values() if not task.is_terminal or task.id in holders],
            leases=leases,
            pledges=list(self._pledges.values()),
            devices=[d for d in self._devices.values() if d.present or self._leased_mb[d.key]],
            nodes=list(self._nodes.values()),
            requests=list(self._requests.values()),
            pauses=list(self.pauses.values()),
            worker_sets=list(self.worker_sets.values()),
            streams=list(self.streams.values()),
            finished=dict(self._finished),
            estimates=list(self._estimates.items()),
            usage=self._usage.rows(),
        )

    async def events(self, after: Position, limit: int, task: TaskId | None = None) -> Sequence[Event]:
        tail = self._log[max(after, self._pruned) :]
        return [event for event, owner in tail if task is None or owner == task][:limit]

    async def moves(self, tasks: Sequence[TaskId]) -> Sequence[Event]:
        kept = self._log[self._pruned :]
        return [event for event, owner in kept if owner in tasks and event.kind in STATE_EVENTS]

    async def head(self) -> Position:
        return Position(len(self._log))

    async def oldest(self) -> Position:
        return Position(self._pruned + 1)

    async def prune(self, term: Term, cutoffs: Cutoffs) -> bool:
        self._require(term)
        left = [task for task in self._tasks.values() if not task.is_terminal]
        awaited = {dependency.task for task in left if task.awaits for dependency in task.after}
        labels = (self._specs[task.id].labels for task in left)
        awaited |= {TaskId(found.get(name, "")) for found in labels for name in WORKER_LABELS}
        over = {it.id for it in self._tasks.values() if it.id not in awaited and self._is_over(it, cutoffs)}
        for task in over:
            del self._tasks[task], self._specs[task]
            self._outcomes.pop(task, None)
            self._checkpoints.pop(task, None)
            self._batch_answers.pop(task, None)
            self.drop_logs_of(task)
        self.drop_pages(over)
        self._keys = {key: known for key, known in self._keys.items() if known[0] not in over}
        stays = (event.at >= cutoffs.finished or event.position > cutoffs.heard for event, _ in self._log)
        first = next((n for n, it in enumerate(stays) if it), None)
        gone = (len(self._log) if first is None else first) - self._pruned
        self._pruned += max(gone, 0)
        return self.prune_objects(cutoffs.expired) or bool(over or gone > 0)

    def _is_over(self, task: Task, cutoffs: Cutoffs) -> bool:
        held = {lease.holder for lease in self._leases.values() if lease.state is not LeaseState.RELEASED}
        keyed = any(first == task.id for first, _ in self._keys.values())
        ended = task.finished_at is not None and task.finished_at < cutoffs.finished
        return ended and task.id not in held and not (keyed and task.submitted_at >= cutoffs.keyed)

    async def record(self, task: TaskId) -> TaskRecord | None:
        row = self._tasks.get(task)
        return None if row is None else self._record(row)

    async def records(self, wanted: TaskFilter) -> Sequence[TaskRecord]:
        rows = [task for task in self._tasks.values() if _matches(task, self._specs[task.id], wanted)]
        if wanted.quarantined is not None:
            used = {it.holder for it in self._leases.values() if it.state is not LeaseState.RELEASED}
            rows = [t for t in rows if not t.is_terminal or (t.id in used) is wanted.quarantined]
        rows.sort(key=wanted.sort.key, reverse=wanted.descending)
        if wanted.after:
            key, is_beyond = wanted.sort.key, lt if wanted.descending else gt
            rows = [task for task in rows if is_beyond(key(task), wanted.after)]
        return [self._record(task) for task in rows[: wanted.limit]]

    async def selected(self, wanted: TaskFilter) -> Sequence[TaskId]:
        found = (record.task for record in await self.records(replace(wanted, limit=len(self._tasks))))
        return [task.id for task in found if task.model is None][: wanted.limit]

    def _record(self, task: Task) -> TaskRecord:
        outcome = self._outcomes.get(task.id)
        failure = None if outcome is None or outcome.failure is None else asdict(outcome.failure)
        return TaskRecord(task, self._specs[task.id], failure)

    async def states(self, tasks: Sequence[TaskId]) -> Mapping[TaskId, StoredState]:
        rows = (self._tasks[task] for task in tasks if task in self._tasks)
        return {row.id: StoredState(row.tenant, row.state, row.failed_by) for row in rows}

    async def specs(self, tasks: Sequence[TaskId]) -> Mapping[TaskId, RunSpec]:
        return {task: self._specs[task] for task in tasks if task in self._specs}

    async def pending_entrypoints(self) -> Mapping[str, int]:
        specs = [self._specs[id] for id, task in self._tasks.items() if task.state is TaskState.PENDING]
        return Counter(spec.entrypoint for spec in specs if spec.kind == "entrypoint")

    async def result(self, task: TaskId) -> StoredResult | None:
        outcome = self._outcomes.get(task)
        if outcome is None:
            return None
        return StoredResult(
            ending=outcome.ending,
            format=outcome.result_format,
            data=outcome.result,
            digest=outcome.result_digest,
            failure=None if outcome.failure is None else asdict(outcome.failure),
            log_tail=outcome.log_tail,
        )

    async def checkpoints(self, task: TaskId) -> Sequence[StoredCheckpoint]:
        return list(self._checkpoints.get(task, {}).values())

    async def referenced(self, digests: Sequence[str]) -> frozenset[str]:
        named = {spec.arguments_digest for spec in self._specs.values()}
        named |= {outcome.result_digest for outcome in self._outcomes.values()}
        named |= {saved.digest for kept in self._checkpoints.values() for saved in kept.values()}
        named |= self.uploaded() | self.digests_of_pages()
        return frozenset(digests).intersection(named)

    async def close(self) -> None:
        self._listeners.clear()


def _matches(task: Task, spec: RunSpec, wanted: TaskFilter) -> bool:
    return (
        wanted.tenant in (None, task.tenant)
        and (not wanted.states or task.state in wanted.states)
        and (wanted.min_priority is None or task.priority >= wanted.min_priority)
        and (wanted.max_priority is None or task.priority <= wanted.max_priority)
        and (wanted.name is None or task.name == wanted.name)
        and (wanted.model_type is None or spec.model_type == wanted.model_type)
        and (wanted.stream is None or task.stream == wanted.stream)
        and (wanted.runs_after is None or any(it.task == wanted.runs_after for it in task.after))
        and _is_within(task.submitted_at, wanted.submitted_from, wanted.submitted_before)
        and _is_within(task.finished_at, wanted.finished_from, wanted.finished_before)
        and wanted.kind in (None, spec.kind if task.external is None else EXTERNAL)
        and all(spec.labels.get(key) == value for key, value in wanted.labels.items())
    )


def _is_within(time: Instant | None, start: Instant | None, end: Instant | None) -> bool:
    if time is None:
        return start is None and end is None
    return (start is None or time >= start) and (end is None or time < end)
