"""The submit of a worker set: its body, its checks, and the tasks and the request to the leader to store."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from gpubroker.wire.worker_sets import Scaling
from msgspec import to_builtins
from msgspec.structs import replace
from pydantic import Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from gpubroker_server.core.admission.admit import AdmissionPolicy, like, no_such
from gpubroker_server.core.admission.defaults import Defaults, NamedDefaults, first
from gpubroker_server.core.admission.submission import Submission
from gpubroker_server.core.domain.decisions import Request
from gpubroker_server.core.domain.submission import (
    WORKER_SET_LABEL,
    WORKER_SET_VARIABLE,
    RunSpec,
    SeatTerms,
    WorkerSet,
    told_variables,
)
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.gateway.submission.resources import ProfileName, Role
from gpubroker_server.gateway.submission.submissions import Submissions
from gpubroker_server.gateway.submission.task_body import (
    ENV_BYTES,
    Command,
    Entrypoint,
    SubmitTask,
)
from gpubroker_server.http.bodies import Body
from gpubroker_server.http.faults import invalid, refuse
from gpubroker_server.http.identity import Identity
from gpubroker_server.http.problems import Fault
from gpubroker_server.ports.store import BatchSubmission

MAX_WORKERS = 256
MAX_CONCURRENT_CALLS = 1000
UNLIMITED_RESTARTS = 2**31 - 1
OWN_ROLE = "self"
NEEDS_ONE = "only workers report calls and CPU, so at least one is needed; set min_count to 1 or more"
_END_FIELDS = ("timeout_seconds", "queue_ttl_seconds", "deadline_at", "deadline_seconds")
_SIZE_FIELDS = ("gpus", "gpu_mb", "gpu_fraction", "cpu", "memory_mb")

MethodName = Annotated[str, StringConstraints(max_length=200, pattern=r"^[A-Za-z][A-Za-z0-9_]*$")]


class HealthCheck(Body):
    """A method without arguments that is called on the worker's own object, and on each role's object that
    has such a method. The check fails if the method raises, returns false or takes too long."""

    method: MethodName = "check_health"
    period_seconds: Annotated[float, Field(gt=0, le=3600)] = 10.0
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0
    failures: Annotated[
        int, Field(ge=1, le=100, description="After this many failures in a row the worker is restarted.")
    ] = 3


class ScaleBy(Body):
    """The value that the number of workers follows, between `min_count` and `max_count`."""

    by: Annotated[
        Literal["calls", "cpu", "signal"],
        Field(
            description="`calls`: the number of calls under way and waiting; `cpu`: the CPU use in per cent "
            "of one core; `signal`: the number that was last posted to `/worker-sets/{id}/signal`."
        ),
    ]
    target: Annotated[
        float, Field(gt=0, le=1e9, description="The part of this value that each worker should have.")
    ]
    down_after_seconds: Annotated[
        float, Field(ge=0, le=86_400, description="Remove workers only after fewer were enough for so long.")
    ] = 60.0


class ColocatedRole(Role):
    """Another class, whose object shares the process of each worker. The worker asks for the maximum of what
    its roles need, not for the sum."""

    run: Entrypoint
    profile: ProfileName = ""


class SubmitWorkerSet(SubmitTask):
    """A set of workers: the class, or the function, that makes each worker's object, and what each worker
    needs. Every worker makes its own object once; a call names a method of this object."""

    count: Annotated[int, Field(ge=0, le=MAX_WORKERS, description="How many workers are wanted.")] = 1
    min_count: Annotated[int | None, Field(ge=0, le=MAX_WORKERS, description="Default: `count`.")] = None
    max_count: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_WORKERS,
            description="Default: `count`. The set can never have more workers than this.",
        ),
    ] = None
    scale: ScaleBy | None = None
    health: HealthCheck | None = None
    start_timeout_seconds: Annotated[
        float,
        Field(
            gt=0,
            le=86_400,
            description="A worker that has not made its objects within this time has failed to start.",
        ),
    ] = 3600.0
    max_restarts: Annotated[
        int | None,
        Field(
            ge=0,
            le=UNLIMITED_RESTARTS,
            description="Most restarts of one worker after failures; null: no limit.",
        ),
    ] = None
    max_concurrency: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_CONCURRENT_CALLS,
            description="How many calls a worker runs at once. Default: that of the profile, or 1.",
        ),
    ] = None
    colocate_with: Annotated[
        dict[MethodName, ColocatedRole],
        Field(max_length=16, description="Further roles in the same process, by name; a call may name one."),
    ] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_counts(self) -> "SubmitWorkerSet":
        least, most = self.bounds
        if not least <= self.count <= most or most == 0:
            text = (
                "min_count {least} must not exceed count {count}, count must not exceed max_count {most}, "
                "and max_count must be 1 or more"
            )
            values = {"least": least, "count": self.count, "most": most}
            raise PydanticCustomError("contradiction", text, values)
        if self.scale is not None and self.scale.by != "signal" and least == 0:
            raise PydanticCustomError("contradiction", NEEDS_ONE)
        return self

    @property
    def bounds(self) -> tuple[int, int]:
        return first(self.min_count, self.count), first(self.max_count, self.count)


def check_worker(body: SubmitWorkerSet) -> None:
    """Check that the body has no fields that a worker of a set cannot have. Raises Problem
    validation-failed."""
    faults = []
    if isinstance(body.run, Command):
        detail = "a program has no methods to call; name a class (entrypoint), or pickle one (function)"
        faults.append(Fault(pointer="/run/command", detail=detail, code="no-methods"))
    if body.resources.bundles:
        detail = "a worker has one process; leave bundles out, and set count"
        faults.append(Fault(pointer="/resources/bundles", detail=detail, code="no-gang"))
    if body.max_retries is not None:
        detail = "a worker set restarts its workers; leave max_retries out, and set max_restarts"
        faults.append(Fault(pointer="/max_retries", detail=detail, code="max-restarts"))
    if body.retry_on is not None:
        detail = "workers are restarted after any failure; leave retry_on out, and set max_restarts"
        faults.append(Fault(pointer="/retry_on", detail=detail, code="max-restarts"))
    for field in _END_FIELDS:
        if getattr(body, field) is not None:
            detail = f"a worker stays until its set is ended; leave {field} out"
            faults.append(Fault(pointer=f"/{field}", detail=detail, code="no-end"))
    if body.colocate_with and body.resources.roles:
        detail = "colocate_with has the roles; give the set's own sizes in resources, without roles"
        faults.append(Fault(pointer="/resources/roles", detail=detail, code="contradiction"))
    if body.held:
        detail = "a worker set cannot be held; leave held out, and set count to 0 to start no workers"
        faults.append(Fault(pointer="/held", detail=detail, code="count"))
    if WORKER_SET_LABEL in body.labels:
        detail = f"the service sets the label {WORKER_SET_LABEL}; choose another name"
        faults.append(Fault(pointer=f"/labels/{WORKER_SET_LABEL}", detail=detail, code="reserved"))
    if faults:
        raise invalid(*faults)


def check_roles(body: SubmitWorkerSet, identity: Identity, policy: AdmissionPolicy) -> None:
    """Check the roles and profiles of the body. Raises Problem for a role that the token or the operator does
    not allow, and for an unknown profile."""
    for role in body.colocate_with.values():
        spec = RunSpec(role.run.tag, role.run.entrypoint)
        refuse(policy.permissions.check_run(identity, spec))
    profiles = policy.defaults.profiles
    named = {f"/colocate_with/{name}/profile": role.profile for name, role in body.colocate_with.items()}
    named["/profile"] = body.profile
    faults = [
        Fault(pointer=pointer, detail=no_such("profile", profile, profiles), code="unknown")
        for pointer, profile in named.items()
        if profile and profile not in profiles
    ]
    if faults:
        raise invalid(*faults)


def with_roles(body: SubmitWorkerSet, defaults: Defaults) -> SubmitWorkerSet:
    """Return the body with its own role and the roles of `colocate_with` as the roles in its resources, so
    that each worker asks for the maximum of each size over the roles."""
    if not body.colocate_with:
        return body
    own_resources = body.resources.model_dump(include={*_SIZE_FIELDS, "custom"})
    if own_resources["gpu_mb"] is not None and not isinstance(own_resources["gpu_mb"], int):
        detail = "a size cannot be learned for several roles together; give gpu_mb in MiB"
        raise invalid(Fault(pointer="/resources/gpu_mb", detail=detail, code="contradiction"))
    roles = {OWN_ROLE: _sized(own_resources, defaults.named(body.model_type, body.profile))}
    for name, role in body.colocate_with.items():
        given = role.model_dump(include={*_SIZE_FIELDS, "custom"})
        roles[name] = _sized(given, defaults.named("", role.profile))
    rest = dict.fromkeys(_SIZE_FIELDS) | {"custom": {}, "roles": roles}
    return body.model_copy(update={"resources": body.resources.model_copy(update=rest)})


def _sized(given: dict[str, Any], usual: NamedDefaults) -> Role:
    """Return a role with the sizes in `given`. Sizes that are missing there come from the profile,
    `usual`."""
    mentions_gpus = any(given[name] is not None for name in ("gpus", "gpu_mb", "gpu_fraction"))
    if not mentions_gpus:
        gpu_mb = usual.gpu_mb if isinstance(usual.gpu_mb, int) else None
        given |= {"gpus": usual.gpus or None, "gpu_mb": gpu_mb}
    sizes = {"cpu": first(given["cpu"], usual.cpu), "memory_mb": first(given["memory_mb"], usual.memory_mb)}
    return Role(**{**given, **sizes})


async def new_worker_set(
    submissions: Submissions,
    identity: Identity,
    body: SubmitWorkerSet,
    worker: Submission,
    named: Mapping[str, str],
) -> BatchSubmission:
    """Return the admitted tasks of a worker set, with the request to form it. `named` maps a place in the run
    to the id of the object that is opened there. All tasks are held until the leader has formed the set.
    Raises Problem if a worker is refused."""
    least, most = body.bounds
    now = submissions.clock.now()
    ids = submissions.ids.tasks(now, most)
    usual = submissions.defaults.named(body.model_type, body.profile).max_concurrency
    concurrency = min(first(body.max_concurrency, usual, 1), MAX_CONCURRENT_CALLS)
    workers = WorkerSet(
        id=ids[0],
        tenant=worker.tenant,
        name=body.name,
        workers=tuple(ids),
        least=least,
        most=most,
        count=body.count,
        max_concurrency=concurrency,
        created_at=Instant(now),
        scaling=None if body.scale is None else Scaling(**body.scale.model_dump()),
    )
    new = await submissions.admitted(identity, _seat(body, worker, workers), named=named, id=ids[0])
    first_task = await submissions.with_object(new)
    tasks = [first_task, *(like(first_task, id, first_task.spec) for id in ids[1:])]
    fields = to_builtins(workers)
    form = Request(submissions.ids.request(now), workers.id, worker.tenant, "form", fields, Instant(now))
    answer = json.dumps({"worker_set": fields, "objects": sorted(set(named.values()))})
    return BatchSubmission(tasks, answer=answer, requests=[form])


def _seat(body: SubmitWorkerSet, worker: Submission, workers: WorkerSet) -> Submission:
    """Return the submission that each worker of the set has. Raises Problem if the roles are too long for the
    environment variable that passes them to the worker's process."""
    seat = SeatTerms(
        id=workers.id,
        max_concurrency=workers.max_concurrency,
        start_seconds=body.start_timeout_seconds,
        health=None if body.health is None else body.health.model_dump(),
        roles={name: role.run.model_dump() for name, role in body.colocate_with.items()},
    )
    labels = {**worker.spec.labels, WORKER_SET_LABEL: workers.id}
    spec = replace(worker.spec, seat=seat, labels=labels)
    size_bytes = len(told_variables(spec)[WORKER_SET_VARIABLE])
    # The kernel takes at most 128 KiB per variable, and children of the worker inherit the variable.
    if size_bytes > ENV_BYTES:
        detail = f"the roles and their arguments have {size_bytes} bytes of JSON, and may have {ENV_BYTES}"
        remedy = "; upload large arguments, and name the objects"
        raise invalid(Fault(pointer="/colocate_with", detail=detail + remedy, code="too-long"))
    restarts = UNLIMITED_RESTARTS if body.max_restarts is None else body.max_restarts
    return replace(worker, spec=spec, max_retries=restarts)
