"""From a body to a task, and from there to the store: the same for a submit and for a question about one."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from math import ceil
from typing import Annotated, NamedTuple

import structlog
from fastapi import Header
from pydantic_core import to_json

from gpubroker_server.core.control.fleet import FleetSeen
from gpubroker_server.core.domain.demand import Demand, may_use_device
from gpubroker_server.core.domain.submission import bytes_of, secrets_named
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Seconds, TaskId
from gpubroker_server.core.domain.values import changed
from gpubroker_server.core.explain.admission import ranks_text
from gpubroker_server.core.planning.forecasts.run_estimates import Size, learned_size, size_of_ranks
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.http.faults import invalid
from gpubroker_server.gateway.http.identity import Identity, Scope
from gpubroker_server.gateway.http.ids import Ids
from gpubroker_server.gateway.http.leader_release import LeaderRelease
from gpubroker_server.gateway.http.problems import Fault, Problem
from gpubroker_server.gateway.http.routing import Call
from gpubroker_server.gateway.status.known_names import unknown_stream
from gpubroker_server.gateway.status.records import TaskRecords
from gpubroker_server.gateway.status.task_view import CONCURRENCY_VARIABLE, PROFILE_VARIABLE, ROLES_VARIABLE
from gpubroker_server.gateway.submission.admission import Capacity, Permissions
from gpubroker_server.gateway.submission.demand import Defaults, demand_of, first, subject_of
from gpubroker_server.gateway.submission.named_objects import check_objects, named_by, objects_in_run
from gpubroker_server.gateway.submission.task_body import Command, Entrypoint, Function, SubmitTask
from gpubroker_server.gateway.submission.timing import dependencies_of, stands_for, timing_of
from gpubroker_server.ports.secrets import SecretStore
from gpubroker_server.ports.store import (
    BlobStore,
    Clock,
    RunSpec,
    StoredState,
    Submission,
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

SHARED_BELOW_CPU = 1.0
"""An entrypoint that asks for less than one CPU, and for no GPU and no env, may share a warm process."""
_HASHED_INLINE_BYTES = 256 * 1024
"""Larger bodies are hashed on a thread."""
_MOST_NAMED = 10
_NO_ARGUMENTS = b'{"args":[],"kwargs":{}}'
_STRICT_JSON = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))


class PreparedTask(NamedTuple):
    task: Task
    learned: Size | None
    """How its size was learned, if it asks for that; of a gang, that of its ranks."""


class Stored(NamedTuple):
    record: TaskRecord
    is_new: bool
    headers: dict[str, str]
    """Of the answer: Location, and whether the request had been sent before."""


@dataclass(frozen=True, slots=True)
class Submissions:
    store: TaskStore
    blobs: BlobStore
    secrets: SecretStore
    world: World
    ids: Ids
    clock: Clock
    defaults: Defaults
    capacity: Capacity
    permissions: Permissions
    records: TaskRecords
    inline_bytes: int
    most_pending: int
    """Of one tenant."""
    most_pending_bytes: int
    """Kept by them for their runs."""
    leader: LeaderRelease
    object_seconds: Seconds
    """An object is kept this long after its last use."""
    fleet: Callable[[], FleetSeen | None]
    """As `Leadership.last_fleet`."""

    async def accept(self, call: Call, body: SubmitTask, key: str | None) -> Stored:
        """Store the task that this body asks for. Raises Problem for whatever it is refused for."""
        try:
            submission = await self.checked(call.identity, body)
            self.check_queue([submission.task])
        except Problem:
            known = await self.sent_before(call, key, "task")
            if known is None:
                raise
            return known
        return await self.submit(call, submission, key, "task")

    async def checked(self, identity: Identity, body: SubmitTask) -> Submission:
        """What this body asks for. Raises Problem for what is never allowed or possible, or not for it."""
        task, learned = await self.new_task(body, identity.tenant)
        await self.check_allowed(identity, body, task)
        self.check_possible(task)
        submission = submission_of(task, self.run_spec(body, body.run, learned))
        await self.check_objects(task.tenant, objects_in_run(submission.spec))
        return submission

    async def new_task(self, body: SubmitTask, tenant: str) -> PreparedTask:
        """The task that this body asks for. Raises Problem if the body is invalid; see also `check_allowed`
        and `check_possible`."""
        stands, now = await stands_for(self.store, body), self.clock.now()
        return self.task_of(body, tenant, self.ids.task(now), stands, now)

    def task_of(
        self, body: SubmitTask, tenant: str, id: TaskId, stands: Mapping[TaskId, StoredState], now: Instant
    ) -> PreparedTask:
        """As `new_task`. `stands`: the states of the tasks that it runs after, as far as they exist."""
        self.check_stream(body.stream)
        self.check_profile(body.profile)
        demand, learned = self.demand_of(body, tenant)
        after = dependencies_of(body, stands, tenant)
        defaults, timing = self.defaults, timing_of(body, now)
        grace = defaults.grace_seconds if body.grace_seconds is None else body.grace_seconds
        limits = defaults.limits_of(body, body.profile)
        is_small = demand.gpus == 0 and demand.cpu < SHARED_BELOW_CPU and not demand.bundles
        is_unlimited = demand.memory_mb == 0  # a limit needs a process of its own
        task = Task(
            id=id,
            tenant=tenant,
            name=body.name,
            priority=limits.priority,
            demand=demand,
            submitted_at=now,
            max_retries=limits.max_retries,
            timeout_seconds=limits.timeout_seconds,
            grace_seconds=Seconds(grace),
            shareable=isinstance(body.run, Entrypoint)
            and is_small
            and is_unlimited
            and not self._env_of(body),
            not_before=timing.not_before,
            after=after,
            awaits=bool(after),
            held=body.held,
            queue_ttl_seconds=timing.queue_ttl_seconds,
            expires_at=timing.expires_at,
            deadline_at=timing.deadline_at,
            expected_seconds=timing.expected_seconds,
            stream=body.stream,
            subject=subject_of(body),
        )
        return PreparedTask(task, learned)

    def demand_of(
        self, body: SubmitTask, tenant: str, *, at: str = "/resources"
    ) -> tuple[Demand, Size | None]:
        """The demand, and how its size was learned if it asks for that. Raises Problem if its pool does not
        fit. `at` points to the resources in the body."""
        sizes: dict[Demand, Size] = {}

        def learn(demand: Demand) -> Size:
            return sizes.setdefault(demand, self._learned_size(demand, tenant, subject_of(body)))

        demand = demand_of(body, self.defaults, learn)
        by_ranks = {
            ranks_text(demand, replace(rank, gpu_mb=size.gpu_mb)) if demand.bundles else "": size
            for rank, size in sizes.items()
        }
        learned = size_of_ranks(by_ranks) if by_ranks else None
        return self.capacity.settled(demand, body.resources.pool, tenant, body.labels, at=at), learned

    def check_stream(self, stream: str) -> None:
        if stream and (fault := unknown_stream(stream, self.world, self.permissions.policy)):
            raise invalid(Fault(pointer="/stream", detail=fault, code="unknown"))

    def check_profile(self, profile: str, *, at: str = "/profile") -> None:
        """Raises Problem for one that the operator does not have."""
        known = sorted(self.defaults.profiles)
        if profile and profile not in known:
            near = get_close_matches(profile, known, n=1)
            meant = f'did you mean "{near[0]}"?' if near else f"there are: {', '.join(known)}"
            detail = f'there is no profile "{profile}"; {meant}'
            raise invalid(Fault(pointer=at, detail=detail, code="unknown"))

    def run_spec(
        self, body: SubmitTask, run: Entrypoint | Command | Function, learned: Size | None = None
    ) -> RunSpec:
        """Of this task, or of one that differs from it in its run alone. Raises Problem."""
        arguments = arguments_of(run)
        return RunSpec(
            kind=run.tag,
            entrypoint=run.entrypoint if isinstance(run, Entrypoint) else "",
            command=tuple(run.command) if isinstance(run, Command) else (),
            arguments=arguments,
            python=run.python if isinstance(run, Function) else "",
            objects=named_by(run, arguments),
            env=self._env_of(body),
            result_format=body.result_format,
            labels=body.labels,
            model_type=body.model_type,
            working_directory=(run.working_directory or "") if isinstance(run, Command) else "",
            sizing=None if learned is None else asdict(learned),
        )

    def _env_of(self, body: SubmitTask) -> Mapping[str, str]:
        """What the client sets, and what of the task its process shall find in its environment."""
        usual = self.defaults.named(body.model_type, body.profile)
        ours = {
            ROLES_VARIABLE: ",".join(sorted(body.resources.roles)),
            PROFILE_VARIABLE: body.profile,
            CONCURRENCY_VARIABLE: str(first(body.max_concurrency, usual.max_concurrency, "")),
        }
        return {**body.env, **{name: value for name, value in ours.items() if value}}

    async def check_allowed(self, identity: Identity, body: SubmitTask, task: Task) -> None:
        """Raises Problem for what the token or the operator does not allow."""
        if body.run is not None:
            self.permissions.check_run(identity, body.run)
        self.permissions.check_env(identity, body.env)
        self.permissions.check_priority(identity, task.priority)
        await self.check_secrets(identity, body.env, task.tenant)

    async def check_secrets(self, identity: Identity, env: Mapping[str, str], tenant: str) -> None:
        """Raises Problem for a secret that the token may not use, that the tenant does not have, or that
        the leader would not look up."""
        named = secrets_named(env)
        if not named:
            return
        identity.require(Scope.SECRETS_USE, "naming a secret in env")
        self.leader.require("secret")
        known = await self.secrets.names(tenant)
        faults = [
            Fault(pointer=f"/env/{variable}", detail=_no_secret(name, tenant, known), code="unknown-secret")
            for variable, name in named.items()
            if name not in known
        ]
        if faults:
            raise invalid(*faults)

    async def check_objects(self, tenant: str, named: Mapping[str, str]) -> None:
        """Raises Problem for those that the tenant does not have, or if the leader would not open them.
        `named`: id by place."""
        if named:
            self.leader.require("object")
            await check_objects(self.store, tenant, named, self.clock.now(), self.object_seconds)

    def check_queue(self, tasks: Iterable[Task]) -> None:
        """Raises Problem if so many more of one tenant, or what they keep, would be too much, or if the fleet
        takes no more of their priority now. A bound, not a count: requests that are under way at once do not
        see each other."""
        more = list(tasks)
        if not more:
            return
        tenant, size_bytes = more[0].tenant, sum(task.queued_bytes for task in more)
        pending = self.world.pending[tenant]
        if pending + len(more) > self.most_pending:
            raise Problem("tenant-queue-full", tenant=tenant, pending=pending, most=self.most_pending)
        pending_bytes, most = self.world.pending_bytes[tenant], self.most_pending_bytes
        if pending_bytes + size_bytes > most:
            raise Problem(
                "tenant-queue-bytes", tenant=tenant, pending=pending_bytes, more=size_bytes, most=most
            )
        self._check_pressure(tenant, min(task.priority for task in more))

    def _check_pressure(self, tenant: str, priority: int) -> None:
        """Those of the last leader hold until the next one is known."""
        fleet = self.fleet()
        for one in () if fleet is None else fleet.pressures:
            if priority < one.closed_below and one.tenant in ("", tenant):
                seconds = ceil(one.retry_after_seconds)
                raise Problem(
                    "backpressure", measure=one.name, value=f"{one.value or 0.0:g}", high=f"{one.high:g}",
                    below=one.closed_below, priority=priority, seconds=seconds,
                    headers={"Retry-After": str(seconds)},
                )  # fmt: skip

    def check_possible(self, task: Task) -> None:
        """Raises Problem for a task that could never run here, or that may run for too long."""
        self.capacity.check(task.demand, task.priority, task.tenant)
        self.capacity.check_times(task)

    async def with_object(self, submission: Submission) -> Submission:
        """With arguments that are too large for the row in an object, which is on disk by then."""
        spec = submission.spec
        if len(spec.arguments) <= self.inline_bytes:
            return submission
        digest = await self.blobs.put(spec.arguments, owner=submission.task.id)
        return replace(submission, spec=changed(spec, arguments=b"", arguments_digest=digest))

    async def submit(
        self, call: Call, submission: Submission, key: str | None, what: str, purpose: str = ""
    ) -> Stored:
        """Store the task once, however often the client sends it. Durable when this returns.

        `what` is `task`, `lease` or `inference`: the same key and body mean different requests for each, or
        for each `purpose` where one is given. Raises Problem idempotency-key-reused.
        """
        submission = await self.with_object(submission)
        task, spec = submission.task, submission.spec
        if key is not None:
            submission = Submission(task, spec, key.strip('"'), await body_hash(call, purpose or what))
        outcome = await self.store.submit(submission)
        headers = {"Location": f"/{what}s/{outcome.task}"}
        match outcome.verdict:
            case SubmitVerdict.KEY_REUSED:
                raise key_reused(str(submission.idempotency_key), outcome.task, what)
            case SubmitVerdict.DUPLICATE:
                return await self._sent_before(call, outcome.task, headers)
            case SubmitVerdict.ACCEPTED:
                log.info(f"{what} accepted", task=task.id, tenant=task.tenant)
                return Stored(TaskRecord(task, spec), is_new=True, headers=headers)

    async def sent_before(self, call: Call, key: str | None, what: str, purpose: str = "") -> Stored | None:
        """The task of an earlier request with this key and body. A repeated request gets it even if a new
        one would be refused by now."""
        if key is None:
            return None
        known = await self.store.known_key(call.identity.tenant, key.strip('"'))
        if known is None or known.body_hash != await body_hash(call, purpose or what):
            return None
        return await self._sent_before(call, known.task, {"Location": f"/{what}s/{known.task}"})

    async def _sent_before(self, call: Call, task: TaskId, headers: dict[str, str]) -> Stored:
        record = await self.records.find(call.identity, task)
        return Stored(record, is_new=False, headers={**headers, "Idempotency-Replayed": "true"})

    def _learned_size(self, demand: Demand, tenant: str, subject: str) -> Size:
        """What earlier runs used of the devices that this demand may use."""
        devices = [it.device for it in self.world.ledgers.values() if may_use_device(demand, it.device)]
        sketches = self.world.learned.sketches
        return learned_size(sketches, tenant, subject, devices, self.permissions.policy)


def arguments_of(run: Entrypoint | Command | Function) -> bytes:
    """What the process gets. Raises Problem if JSON arguments hold NaN or an infinity."""
    match run:
        case Entrypoint() if not run.args and not run.kwargs:
            return _NO_ARGUMENTS
        case Entrypoint():
            text = to_json({"args": run.args, "kwargs": run.kwargs}, inf_nan_mode="constants")
            if b"NaN" not in text and b"Infinity" not in text:
                return text
            try:  # the word may be in a string
                return _STRICT_JSON.encode({"args": run.args, "kwargs": run.kwargs}).encode()
            except ValueError:
                detail = (
                    "arguments must be JSON values, without NaN, Infinity and numbers beyond 64-bit floats"
                )
                raise invalid(Fault(pointer="/run", detail=detail, code="finite-number")) from None
        case Function():
            return run.function
        case Command():
            return b""


def submission_of(task: Task, spec: RunSpec) -> Submission:
    """`spec` has the arguments, however large; see `Submissions.with_object`."""
    return Submission(changed(task, queued_bytes=bytes_of(spec)), spec)


async def body_hash(call: Call, what: str) -> str:
    """Of this body, as sent by this tenant for this purpose."""
    hashed = f"{what}\0{call.identity.tenant}\0".encode() + await call.body()
    if len(hashed) <= _HASHED_INLINE_BYTES:
        return hashlib.sha256(hashed).hexdigest()
    return await asyncio.to_thread(lambda: hashlib.sha256(hashed).hexdigest())


def key_reused(key: str, task: TaskId, what: str) -> Problem:
    return Problem("idempotency-key-reused", key=key, task=task, what=what)


def _no_secret(name: str, tenant: str, known: Sequence[str]) -> str:
    others = ", ".join(known[:_MOST_NAMED]) or "none yet"
    return (
        f'tenant "{tenant}" has no secret "{name[:100]}"; set it with `gpubroker secrets set NAME` (PUT '
        f"/secrets/NAME), or name one that it has: {others}"
    )
