"""Turns submissions into stored tasks: reads the facts that admission needs, and carries out its decision."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import ceil
from typing import Annotated, NamedTuple

import structlog
from fastapi import Header
from msgspec import Struct
from msgspec.structs import replace

from gpubroker_server.core.admission.admit import AdmissionPolicy, admit, unknown_objects
from gpubroker_server.core.admission.defaults import Defaults
from gpubroker_server.core.admission.facts import INVALID, NO_OBJECTS, NO_STATES, Facts, Refused
from gpubroker_server.core.admission.permissions import Permissions
from gpubroker_server.core.admission.submission import Submission
from gpubroker_server.core.control.fleet import FleetSeen
from gpubroker_server.core.domain.decisions import known_streams
from gpubroker_server.core.domain.limits import ServiceLimits
from gpubroker_server.core.domain.stored_objects import StoredObject
from gpubroker_server.core.domain.submission import secrets_named
from gpubroker_server.core.domain.task import ON_FAILURE, Task
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.status.records import TaskRecords
from gpubroker_server.gateway.submission.capacity import Capacity
from gpubroker_server.gateway.submission.named_objects import find_objects, objects_in_run
from gpubroker_server.http.faults import invalid, problem_of
from gpubroker_server.http.identity import Identity, Scope
from gpubroker_server.http.ids import Ids, is_task_id
from gpubroker_server.http.leader_release import LeaderRelease
from gpubroker_server.http.problems import Fault, Problem
from gpubroker_server.http.routing import Call
from gpubroker_server.http.waiters import LeaderRequests
from gpubroker_server.ports.secrets import SecretStore
from gpubroker_server.ports.store import (
    AdmittedTask,
    BatchSubmission,
    BlobStore,
    Clock,
    StoredState,
    SubmitVerdict,
    TaskRecord,
    TaskStore,
)

log = structlog.get_logger("gpubroker.gateway")

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=r'^("[\x21\x23-\x7e]{1,255}"|[\x21\x23-\x7e]{1,255})$',
        description="A request with the same key and body gets the answer of the first one.",
    ),
]

NOTHING_KEPT: Mapping[str, StoredObject] = {}
_HASHED_INLINE_BYTES = 256 * 1024
"""The size in bytes above which a body is hashed on a thread."""


class SentKey(NamedTuple):
    """The key and the hash that tell a repeated request from a new one."""

    key: str
    body_hash: str


class Stored(NamedTuple):
    """The result of a submit."""

    record: TaskRecord
    is_new: bool
    """False if an earlier request with the same key and body stored the task."""
    headers: dict[str, str]
    """The headers of the answer: Location, and Idempotency-Replayed unless the task is new."""


class Submissions(Struct, frozen=True):
    store: TaskStore
    blobs: BlobStore
    secrets: SecretStore
    world: World
    ids: Ids
    clock: Clock
    policy: AdmissionPolicy
    capacity: Capacity
    records: TaskRecords
    requests: LeaderRequests
    limits: ServiceLimits
    leader: LeaderRelease
    fleet: Callable[[], FleetSeen | None]
    """The fleet as the last leader saw it; see `Leadership.last_fleet`."""

    @property
    def permissions(self) -> Permissions:
        return self.policy.permissions

    @property
    def defaults(self) -> Defaults:
        return self.policy.defaults

    async def accept(self, identity: Identity, submission: Submission, sent: SentKey | None) -> Stored:
        """Store the task that a request asks for. Raises Problem if the task is refused."""
        try:  # This repeats `once`, because a call of `once` would cost each task one more frame.
            new = await self.admitted(identity, submission)
            self.check_queue((new.task,))
        except Problem as refused:
            return await self._sent_before(identity, sent, "task", refused)
        return await self._submit(identity, new, sent, "task")

    async def once(
        self,
        identity: Identity,
        sent: SentKey | None,
        noun: str,
        new_task: Callable[[], Awaitable[AdmittedTask]],
    ) -> Stored:
        """Store the task that `new_task` admits, once however often the client sends the request. The task is
        durable when this returns.

        A repeated request is answered again even if a new one would be refused by now. `noun` is `task`,
        `lease` or `inference`. Raises Problem if the task is refused.
        """
        try:
            new = await new_task()
            self.check_queue((new.task,))
        except Problem as refused:
            return await self._sent_before(identity, sent, noun, refused)
        return await self._submit(identity, new, sent, noun)

    async def admitted(
        self,
        identity: Identity,
        submission: Submission,
        *,
        named: Mapping[str, str] | None = None,
        id: TaskId | None = None,
        now: Instant | None = None,
        states: Mapping[TaskId, StoredState] | None = None,
    ) -> AdmittedTask:
        """Return the admitted task of a submission. Raises Problem if the submission is refused.

        `named` maps a place to the id of an object that the task opens; it defaults to the objects in the
        arguments. `id` and `now` are the id and the time of the new task if they are already fixed: the tasks
        of a batch have one time, and their ids are in the order of the batch. `states` maps the tasks that it
        runs after to their states, if these have been read.
        """
        if named is None and submission.spec.objects:
            named = objects_in_run(submission.spec)
        kept, missing = NOTHING_KEPT, NO_OBJECTS
        if named:
            kept = await self._find_objects(submission.tenant, named)
            missing = {place: id for place, id in named.items() if id not in kept}
        if (uploaded := kept.get(submission.spec.upload)) is not None:
            self._check_upload(uploaded)
        verdict = await self.judged(identity, submission, missing=missing, id=id, now=now, states=states)
        if isinstance(verdict, Refused):
            raise problem_of(verdict)
        if kept:
            await self._note_uses(kept)
        return verdict

    async def judged(
        self,
        identity: Identity,
        submission: Submission,
        *,
        missing: Mapping[str, str] = NO_OBJECTS,
        id: TaskId | None = None,
        now: Instant | None = None,
        states: Mapping[TaskId, StoredState] | None = None,
    ) -> AdmittedTask | Refused:
        """Return the decision of admission on a submission. The optional parameters are those of `admitted`;
        `missing` maps a place to the id of an object that the tenant does not have. Raises Problem
        leader-outdated if the leader's release would run the task wrongly."""
        now = self.clock.now() if now is None else now
        spec, tenant = submission.spec, submission.tenant
        facts = Facts(self.ids.task(now) if id is None else id, now, self.capacity, identity)
        if submission.after:
            dependencies = await self._states_of(submission) if states is None else states
            facts = replace(facts, dependencies=dependencies)
        if submission.stream:
            streams = known_streams(self.permissions.policy.streams, self.world.streams)
            facts = replace(facts, streams=tuple(streams))
        if spec.upload or spec.outputs:
            self.leader.require("upload")
        if spec.environment is not None:
            self.leader.require("environment")
        if spec.ray:
            self.leader.require("ray")
        if submission.retry_on != ON_FAILURE:
            self.leader.require("retry_on")
        if spec.env and secrets_named(spec.env) and identity.may(Scope.SECRETS_USE):
            self.leader.require("secret")
            facts = replace(facts, secrets=await self.secrets.names(tenant))
        if missing:
            facts = replace(facts, missing_objects=missing, object_seconds=self.limits.object_seconds)
        return admit(submission, facts, self.policy)

    async def use_objects(self, tenant: str, named: Mapping[str, str]) -> None:
        """Record that a run opens objects. `named` maps a place to the id of an object. Raises Problem if the
        tenant lacks one of the objects."""
        if not named:
            return
        kept = await self._find_objects(tenant, named)
        missing = {place: id for place, id in named.items() if id not in kept}
        if faults := tuple(unknown_objects(missing, self.limits.object_seconds)):
            raise problem_of(Refused(INVALID, faults=faults))
        await self._note_uses(kept)

    def _check_upload(self, uploaded: StoredObject) -> None:
        """Check the size of an uploaded archive. Raises Problem if no node would unpack it."""
        if uploaded.size_bytes > (most := self.limits.upload_bytes):
            detail = (
                f"the archive has {uploaded.size_bytes} bytes, and may have {most}; leave out what the task "
                "does not need, store data as objects, or have the operator raise limits.upload_bytes"
            )
            raise invalid(Fault(pointer="/upload", detail=detail, code="upload-too-large"))

    async def _find_objects(self, tenant: str, named: Mapping[str, str]) -> Mapping[str, StoredObject]:
        self.leader.require("object")
        return await find_objects(self.store, tenant, set(named.values()), self.clock.now())

    async def _note_uses(self, kept: Mapping[str, StoredObject]) -> None:
        for kept_object in kept.values():
            await self.store.note_use(kept_object, self.clock.now(), self.limits.object_seconds)

    async def _states_of(self, submission: Submission) -> Mapping[TaskId, StoredState]:
        """Return the states of the tasks that the submission runs after. Tasks that do not exist are left
        out."""
        ids = {dependency.task for dependency in submission.after if is_task_id(dependency.task)}
        return await self.store.states(sorted(ids)) if ids else NO_STATES

    def check_queue(self, more: Sequence[Task]) -> None:
        """Check that the queue has room for more tasks of one tenant. Raises Problem if their number or their
        stored bytes exceed the tenant's limits, or if the fleet takes no more tasks of their priority now.

        Concurrent requests do not see each other, so they may exceed a limit together.
        """
        if not more:
            return
        tenant, lowest, size_bytes = more[0].tenant, more[0].priority, 0
        for task in more:
            size_bytes += task.queued_bytes
            if task.priority < lowest:
                lowest = task.priority
        pending, limit = self.world.pending[tenant], self.limits.tenant_pending_tasks
        if pending + len(more) > limit:
            raise Problem("tenant-queue-full", tenant=tenant, pending=pending, most=limit)
        pending_bytes, limit = self.world.pending_bytes[tenant], self.limits.tenant_pending_bytes
        if pending_bytes + size_bytes > limit:
            raise Problem(
                "tenant-queue-bytes", tenant=tenant, pending=pending_bytes, more=size_bytes, most=limit
            )
        if self.permissions.policy.autoscaler:
            self._check_nodes_to_come(tenant, more)
        self._check_pressure(tenant, lowest)

    def _check_nodes_to_come(self, tenant: str, more: Sequence[Task]) -> None:
        """Check how many tasks of the tenant wait for nodes that an autoscaler may add. Raises Problem if
        there are too many."""
        new = sum(self.capacity.lacks_node(task.demand) for task in more)
        limit = self.permissions.policy.autoscaler_tasks
        if new and (waiting := self.capacity.waiting_for_nodes(tenant)) + new > limit:
            detail = (
                f'tenant "{tenant}" has {waiting} tasks that wait for nodes which autoscaler '
                f"{self.permissions.policy.autoscaler} may add, and may have {limit} "
                "(policy.autoscaler_tasks); nothing was stored; send it again when there are such nodes"
            )
            raise Problem("tenant-queue-full", detail)

    def _check_pressure(self, tenant: str, priority: int) -> None:
        """Check that the fleet takes tasks of this priority, by what the last leader reported. Raises Problem
        backpressure if the fleet is too busy."""
        fleet = self.fleet()
        for pressure in () if fleet is None else fleet.pressures:
            if priority < pressure.closed_below and pressure.tenant in ("", tenant):
                seconds = ceil(pressure.retry_after_seconds)
                raise Problem(
                    "backpressure", measure=pressure.name, value=f"{pressure.value or 0.0:g}",
                    high=f"{pressure.high:g}", below=pressure.closed_below, priority=priority,
                    seconds=seconds, headers={"Retry-After": str(seconds)},
                )  # fmt: skip

    async def with_object(self, new: AdmittedTask) -> AdmittedTask:
        """Return the task with its arguments moved to an object if they are too large for the row. The object
        is on disk when this returns."""
        spec = new.spec
        if len(spec.arguments) <= self.limits.inline_bytes:
            return new
        digest = await self.blobs.put(spec.arguments, owner=new.task.id)
        return replace(new, spec=replace(spec, arguments=b"", arguments_digest=digest))

    async def _submit(self, identity: Identity, new: AdmittedTask, sent: SentKey | None, noun: str) -> Stored:
        """Store an admitted task. Raises Problem idempotency-key-reused."""
        if len(new.spec.arguments) > self.limits.inline_bytes:
            new = await self.with_object(new)
        task, spec = new.task, new.spec
        if sent is not None:
            new = replace(new, idempotency_key=sent.key, body_hash=sent.body_hash)
        outcome = await self.store.submit(new)
        match outcome.verdict:
            case SubmitVerdict.KEY_REUSED:
                raise key_reused(str(new.idempotency_key), outcome.task, noun)
            case SubmitVerdict.DUPLICATE:
                return await self._stored_before(identity, outcome.task, noun)
            case SubmitVerdict.ACCEPTED:
                log.info(f"{noun} accepted", task=task.id, tenant=task.tenant)
                return Stored(TaskRecord(task, spec), True, {"Location": f"/{noun}s/{task.id}"})

    async def batch_once(
        self,
        call: Call,
        key: str | None,
        noun: str,
        new_batch: Callable[[], Awaitable[BatchSubmission]],
        *,
        purpose: str = "",
    ) -> tuple[TaskId, bool]:
        """Store the batch that `new_batch` makes, once however often the client sends the request. Returns
        the first task of the batch, which identifies it, and True if this request has stored the batch. The
        batch is durable when this returns.

        A repeated request is answered again even if a new one would be refused by now. `purpose` tells apart
        requests with the same key and body; it defaults to `noun`. Raises Problem if the batch is refused.
        """
        sent = await sent_key(call, key, purpose or noun)
        earlier = None if sent is None else await self.store.known_key(call.identity.tenant, sent.key)
        if sent is not None and earlier is not None:
            if earlier.body_hash != sent.body_hash:
                raise key_reused(sent.key, earlier.task, noun)
            return earlier.task, False
        batch = await new_batch()
        if not batch.submissions:
            return TaskId(""), True  # All tasks of the batch are refused, and nothing is stored.
        self.check_queue([new.task for new in batch.submissions])
        if sent is not None:
            batch = replace(batch, idempotency_key=sent.key, body_hash=sent.body_hash)
        with self.requests.expected(batch.requests) as settle:
            outcome = await self.store.submit_batch(batch)
            if outcome.verdict is SubmitVerdict.KEY_REUSED:
                raise key_reused(str(batch.idempotency_key), outcome.task, noun)
            if outcome.verdict is SubmitVerdict.ACCEPTED:
                await settle()
        return outcome.task, outcome.verdict is SubmitVerdict.ACCEPTED

    async def _sent_before(
        self, identity: Identity, sent: SentKey | None, noun: str, refused: Problem
    ) -> Stored:
        """Return the task of an earlier request with this key and body. Raises `refused` if there is none."""
        earlier = None if sent is None else await self.store.known_key(identity.tenant, sent.key)
        if sent is None or earlier is None or earlier.body_hash != sent.body_hash:
            raise refused
        return await self._stored_before(identity, earlier.task, noun)

    async def _stored_before(self, identity: Identity, task: TaskId, noun: str) -> Stored:
        record = await self.records.find(identity, task)
        return Stored(record, False, accepted_headers(f"/{noun}s/{task}", is_new=False))


async def sent_key(call: Call, key: str | None, purpose: str) -> SentKey | None:
    """Return the key and hash by which a repetition of this request is recognised; None if the client sends
    no key. Requests with the same key and body but different purposes are different requests."""
    if key is None:
        return None
    return SentKey(key.strip('"'), await body_hash(purpose, call.identity.tenant, await call.body()))


async def body_hash(purpose: str, tenant: str, body: bytes) -> str:
    """Return the hash of a body together with its purpose and tenant."""
    hashed = f"{purpose}\0{tenant}\0".encode() + body
    if len(hashed) <= _HASHED_INLINE_BYTES:
        return hashlib.sha256(hashed).hexdigest()
    return await asyncio.to_thread(lambda: hashlib.sha256(hashed).hexdigest())


def accepted_headers(location: str, *, is_new: bool) -> dict[str, str]:
    """Return the headers of the answer to a submit. `is_new` is False if the request was answered before."""
    return {"Location": location} if is_new else {"Location": location, "Idempotency-Replayed": "true"}


def key_reused(key: str, task: TaskId, noun: str) -> Problem:
    return Problem("idempotency-key-reused", key=key, task=task, what=noun)
