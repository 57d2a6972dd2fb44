"""Turn a submission into a task or its refusals, in one pass for every kind of submitter."""

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Final, assert_never

from gpubroker.wire.forecasts import Sizing
from gpubroker.wire.policy import TaskLimits
from msgspec import Struct
from msgspec.structs import replace

from gpubroker_server.core.admission.defaults import Defaults, NamedDefaults
from gpubroker_server.core.admission.demands import (
    ProfileDefaults,
    ranks_with_gpus_of_profile,
    settled_demand,
)
from gpubroker_server.core.admission.environments import EnvironmentPolicy, check_environment, environment_for
from gpubroker_server.core.admission.facts import INVALID, Facts, Refused, refused_at
from gpubroker_server.core.admission.feasibility import (
    check_priority,
    check_quota,
    check_times,
    new_nodes_could_take,
)
from gpubroker_server.core.admission.permissions import SECRETS_SCOPE, Permissions, lacks
from gpubroker_server.core.admission.ray_clusters import ray_defaults, ray_fault, with_ray_defaults
from gpubroker_server.core.admission.submission import Asked, Sender, Submission
from gpubroker_server.core.admission.times import UNTIMED, Timing, timing_of
from gpubroker_server.core.domain.demand import Demand, environment_of, in_environment, interned
from gpubroker_server.core.domain.environment import environment_key
from gpubroker_server.core.domain.holders import (
    External,
    Gang,
    Holder,
    Inference,
    Model,
    Run,
    WorkerSeat,
    holder_of,
)
from gpubroker_server.core.domain.reasons import Refusal
from gpubroker_server.core.domain.submission import (
    EXTERNAL_KIND,
    INFERENCE_KIND,
    MODEL_KIND,
    AdmittedTask,
    RunSpec,
    bytes_of,
    secrets_named,
)
from gpubroker_server.core.domain.suggestions import did_you_mean
from gpubroker_server.core.domain.task import RetryOn, Task
from gpubroker_server.core.domain.units import Instant, Seconds, TaskId

SHARED_BELOW_CPU: Final = 1.0
"""The number of CPUs below which an entrypoint may share a warm process, if it asks for no GPU and no env."""
WORKER_RETRIES: Final = 10
"""The number of times in a row that a worker of an array is started again after it ended before its first
report."""
_MOST_NAMED = 10
_AGENTLESS: Final = frozenset({EXTERNAL_KIND, MODEL_KIND, INFERENCE_KIND})


class AdmissionPolicy(Struct, frozen=True):
    """The operator's permissions, and the defaults for fields that a submission leaves out."""

    permissions: Permissions
    defaults: Defaults
    environments: EnvironmentPolicy = EnvironmentPolicy()


def admit(submission: Submission, facts: Facts, policy: AdmissionPolicy) -> AdmittedTask | Refused:
    """Return the new task, or the refusal of the submission.

    All invalid fields are reported together. If there are none, the permissions of the token and the operator
    are checked, and then whether the demand could ever be satisfied here.
    """
    faults: list[Refusal] = []
    timing = UNTIMED
    if submission.times is not None:
        has_dependencies = bool(submission.after)
        timing = timing_of(submission.times, facts.now, has_dependencies=has_dependencies, faults=faults)
    if submission.stream or submission.spec.profile or submission.after or _names_profiles(submission):
        faults = [*_unknown_names(submission, facts, policy), *faults]
    if faults:
        return Refused(INVALID, faults=tuple(faults))
    new = _new_task(submission, timing, facts, policy)
    if isinstance(new, Refused):
        return new
    refused = _not_allowed(submission, new, facts, policy) or _impossible(submission, new, facts, policy)
    return new if refused is None else replace(refused, would_be=new)


def with_run(new: AdmittedTask, spec: RunSpec) -> AdmittedTask:
    """Return the admitted task with another run specification, for example with its arguments added."""
    return replace(new, task=replace(new.task, queued_bytes=bytes_of(spec)), spec=spec)


def like(first: AdmittedTask, id: TaskId, spec: RunSpec) -> AdmittedTask:
    """Return a task that differs from an admitted one only in its id and its run specification, so that
    admission is not repeated. The caller must have checked that the run is allowed; see
    `Permissions.check_run`."""
    return AdmittedTask(replace(first.task, id=id, queued_bytes=bytes_of(spec)), spec, like=first)


def like_with(first: AdmittedTask, id: TaskId, arguments: bytes) -> AdmittedTask:
    """Return a task that differs from an admitted one only in its id and its arguments. Batches have
    thousands of such tasks, so the other bytes that they keep are not counted again. The first task must have
    its arguments in its specification, and neither may name objects."""
    queued_bytes = first.task.queued_bytes + len(arguments) - len(first.spec.arguments)
    task = replace(first.task, id=id, queued_bytes=queued_bytes)
    return AdmittedTask(task, replace(first.spec, arguments=arguments), like=first)


def no_such(noun: str, name: str, known: Collection[str]) -> str:
    """Return the text that says that there is no `noun` of this name, and which name may be meant."""
    suggestion = did_you_mean(name, known, otherwise=f"there are: {', '.join(sorted(known)) or 'none'}")
    return f'there is no {noun} "{name[:100]}"; {suggestion}'


def _unknown_names(submission: Submission, facts: Facts, policy: AdmissionPolicy) -> Iterator[Refusal]:
    """Yield a refusal for each stream or profile that does not exist, and for each dependency that the tenant
    does not have.

    Whether a dependency has ended is not checked here. The leader checks it when the new task is committed.
    """
    stream, profile, profiles = submission.stream, submission.spec.profile, policy.defaults.profiles
    if stream and stream not in facts.streams:
        yield Refusal("unknown", no_such("work stream", stream, facts.streams), "/stream")
    if profile and profile not in profiles:
        yield Refusal("unknown", no_such("profile", profile, profiles), "/profile")
    if isinstance(submission.demand, Asked):
        yield from unknown_rank_profiles(submission.demand, profiles)
    named: list[TaskId] = []
    for index, dependency in enumerate(submission.after):
        id, state = dependency.task, facts.dependencies.get(dependency.task)
        if state is None or state.tenant != submission.tenant:
            detail = f'there is no task "{id}"; GET /tasks lists yours'
            yield Refusal("unknown-task", detail, f"/after/{index}/task")
        elif id in named:
            detail = f"task {id} is already at /after/{named.index(id)}; name it once"
            yield Refusal("named-twice", detail, f"/after/{index}/task")
        named.append(id)


def _names_profiles(submission: Submission) -> bool:
    """Return True if some rank of a gang names a profile of its own."""
    asked = submission.demand
    return isinstance(asked, Asked) and bool(asked.bundles) and any(rank.profile for rank in asked.bundles)


def unknown_rank_profiles(asked: Asked, profiles: Collection[str]) -> Iterator[Refusal]:
    """Yield a refusal for each profile that ranks of a gang name and that does not exist."""
    for profile in sorted({rank.profile for rank in asked.bundles} - {"", *profiles}):
        yield Refusal("unknown", no_such("profile", profile, profiles), "/resources/bundles")


def _new_task(
    submission: Submission, timing: Timing, facts: Facts, policy: AdmissionPolicy
) -> AdmittedTask | Refused:
    spec, subject = submission.spec, _subject_of(submission)
    usual = policy.defaults.named(spec.model_type, spec.profile)
    size: Sizing | None = None
    if spec.environment is not None or usual.environment:
        settled_environment = environment_for(spec, usual, policy.defaults, policy.permissions.python)
        if isinstance(settled_environment, Refused):
            return settled_environment
        spec = replace(spec, environment=settled_environment)
    of_profile: ProfileDefaults = partial(policy.defaults.named, spec.model_type)
    if spec.ray:
        usual, of_profile = with_ray_defaults(usual), ray_defaults(of_profile)
    if isinstance(submission.demand, Demand):
        demand = submission.demand
    else:
        settled = settled_demand(
            submission.demand,
            usual,
            of_profile,
            policy.defaults.cpu,
            facts.fleet,
            subject,
            submission.tenant,
            spec.labels,
            policy.permissions.policy,
        )
        if isinstance(settled, Refusal):
            return refused_at(_demand_at(spec), settled)
        demand, size = settled
    if spec.ray:
        fault = ray_fault(spec, demand, shared_allowed=policy.permissions.shares_ray)
        if fault is not None:
            return Refused(INVALID, faults=(fault,))
    if size is not None:
        spec = replace(spec, sizing=size)
    if spec.environment is not None:
        key = environment_key(spec.environment, policy.environments.owner(submission.tenant))
        demand = interned(in_environment(demand, key))
    if usual.max_concurrency is not None and spec.max_concurrency is None:
        spec = replace(spec, max_concurrency=usual.max_concurrency)
    limits = _limits_of(submission, usual, facts.sender, policy)
    return AdmittedTask(_task_of(submission, spec, demand, limits, timing, subject, facts), spec)


def _task_of(
    submission: Submission,
    spec: RunSpec,
    demand: Demand,
    limits: TaskLimits,
    timing: Timing,
    subject: str,
    facts: Facts,
) -> Task:
    """Return the new task. All new tasks are made here."""
    retries, timeout, held = limits.max_retries, limits.timeout_seconds, submission.held
    expires_at, retry_on = timing.expires_at, submission.retry_on
    holder: Holder = holder_of(demand) if submission.holder is None else submission.holder
    if spec.items is not None:
        retries, retry_on, holder = WORKER_RETRIES, tuple(RetryOn), WorkerSeat(spec.items.id)
    elif spec.seat is not None:
        # The worker stays until its set is ended, and is held until the leader has the row of the set.
        timeout, held = None, True
    elif isinstance(holder, Model) and holder.model:
        # A server's base cost, whose holder names no model, is wanted for as long as the server exists.
        expires_at = Instant(facts.now + holder.wanted_seconds)
    return Task(
        id=facts.id,
        tenant=submission.tenant,
        name=submission.name,
        priority=limits.priority,
        demand=demand,
        submitted_at=facts.now,
        max_retries=retries,
        retry_on=retry_on,
        timeout_seconds=None if timeout is None else Seconds(timeout),
        grace_seconds=Seconds(limits.grace_seconds),
        shareable=demand.cpu < SHARED_BELOW_CPU and _is_shareable(spec, demand),
        after=submission.after,
        queue_ttl_seconds=timing.queue_ttl_seconds,
        deadline_at=timing.deadline_at,
        expected_seconds=None
        if (expected_seconds := submission.expected_seconds) is None
        else Seconds(expected_seconds),
        stream=submission.stream,
        subject=subject,
        queued_bytes=bytes_of(spec),
        held=held,
        awaits=bool(submission.after),
        expires_at=expires_at,
        not_before=timing.not_before,
        holder=holder,
    )


def _is_shareable(spec: RunSpec, demand: Demand) -> bool:
    """Return True if a small task may run in a shared process. A limit on host memory, environment variables
    or a directory need a process of their own."""
    if spec.kind != "entrypoint" or spec.env or spec.is_told_more or spec.upload or spec.outputs:
        return False
    if spec.environment is not None:
        return False
    return demand.gpus == 0 and demand.memory_mb == 0 and not demand.bundles


def _subject_of(submission: Submission) -> str:
    """Return the name under which sizes and run times of such runs are learned; empty if nothing is
    learned."""
    spec = submission.spec
    return "" if spec.kind in _AGENTLESS else spec.model_type or submission.name or spec.entrypoint


def _limits_of(
    submission: Submission, usual: NamedDefaults, sender: Sender | None, policy: AdmissionPolicy
) -> TaskLimits:
    defaults = policy.defaults
    priority, retries = submission.priority, submission.max_retries
    timeout, grace = submission.timeout_seconds, submission.grace_seconds
    kind = submission.spec.kind
    if priority is None:
        usual_priority = defaults.priority if usual.priority is None else usual.priority
        priority = policy.permissions.default_priority(sender, usual_priority, submission.tenant)
    if grace is None:
        grace = 0.0 if kind == INFERENCE_KIND else defaults.grace_seconds
    if kind not in (EXTERNAL_KIND, MODEL_KIND) and not isinstance(submission.demand, Demand):
        if retries is None:
            retries = defaults.max_retries if usual.max_retries is None else usual.max_retries
        if timeout is None:
            timeout = defaults.timeout_seconds if usual.timeout_seconds is None else usual.timeout_seconds
    return TaskLimits(priority, retries or 0, grace, timeout)


def _not_allowed(
    submission: Submission, new: AdmittedTask, facts: Facts, policy: AdmissionPolicy
) -> Refused | None:
    """Return the refusal if the token or the operator does not allow the task, or if the tenant lacks an
    object or a secret that the task names; otherwise None."""
    sender, spec, permissions = facts.sender, new.spec, policy.permissions
    if sender is None:
        return None
    python = facts.fleet.python_of(environment_of(new.task.demand)) if spec.environment is not None else ""
    refused = (
        permissions.check_run(sender, spec, submission.cloudpickle, python)
        or check_environment(sender, spec, policy.environments)
        or permissions.check_env(sender, spec.env)
        or (
            # A default is never above the cap.
            None
            if submission.priority is None
            else permissions.check_priority(sender, new.task.priority, submission.tenant)
        )
    )
    if refused is not None:
        return refused
    faults: list[Refusal] = []
    if facts.missing_objects:
        faults += unknown_objects(facts.missing_objects, facts.object_seconds)
    named = secrets_named(spec.env) if spec.env else None
    if named:
        refused = lacks(sender, SECRETS_SCOPE, "naming a secret in env")
        if refused is not None:
            return refused
        faults += (
            Refusal("unknown-secret", _no_secret(name, submission.tenant, facts.secrets), f"/env/{variable}")
            for variable, name in named.items()
            if name not in facts.secrets
        )
    return Refused(INVALID, faults=tuple(faults)) if faults else None


def _impossible(
    submission: Submission, new: AdmittedTask, facts: Facts, policy: AdmissionPolicy
) -> Refused | None:
    """Return the refusal of a task that could never run here, or whose times or retries exceed the maximum;
    otherwise None."""
    task, spec, limits = new.task, new.spec, policy.permissions.policy
    demand = task.demand
    if not _is_there(task, held=submission.held):
        refusal = facts.fleet.refusal(demand)
        # A model is loaded on its server's node, to which no autoscaler adds devices.
        if (
            refusal is not None
            and not isinstance(task.holder, Model)
            and new_nodes_could_take(demand, limits)
        ):
            refusal = None
        if refusal is None and demand.custom:
            refusal = check_priority(demand, task.priority, limits)
        if refusal is None and limits.has_quotas and (demand.gpus or demand.bundles):
            refusal = check_quota(demand, facts.fleet.counted_mb(demand), task.tenant, limits)
        if refusal is not None:
            return refused_at(_demand_at(spec), _with_profile(refusal, submission, demand))
    if facts.sender is None:
        return None  # the operator's settings give a model its limits
    # The service itself restarts workers of arrays and of sets.
    retries = task.max_retries if spec.items is None and spec.seat is None else 0
    refusal = check_times(task.timeout_seconds, retries, task.grace_seconds, limits)
    return None if refusal is None else refused_at("", refusal)


def _with_profile(refusal: Refusal, submission: Submission, demand: Demand) -> Refusal:
    """Return the refusal with a sentence about ranks that have GPUs only because of the task's profile."""
    profile, asked = submission.spec.profile, submission.demand
    if not profile or not isinstance(asked, Asked):
        return refusal
    ranks = ranks_with_gpus_of_profile(asked, demand)
    if not ranks:
        return refusal
    numbers = ", ".join(map(str, ranks[:_MOST_NAMED]))
    hint = (
        f"ranks that state no GPUs have those of profile {profile} (rank {numbers}): give gpus: 0 in their "
        "bundles, or name the profile only in the bundles that are meant"
    )
    return replace(refusal, message=f"{refusal.message}; {hint}")


def _is_there(task: Task, *, held: bool) -> bool:
    """Return True if the task needs no new room. An inference uses the memory of its model, and a held model
    was already in memory when its server was adopted."""
    match task.holder:
        case Run() | Gang() | WorkerSeat() | External():
            return False
        case Model():
            return held
        case Inference():
            return True
        case _:
            assert_never(task.holder)


def _demand_at(spec: RunSpec) -> str:
    """Return the pointer to the resources in a body; empty for leases, models and inferences, which have no
    field for them."""
    return "" if spec.kind in _AGENTLESS else "/resources"


def unknown_objects(missing: Mapping[str, str], object_seconds: float) -> Iterator[Refusal]:
    """Yield a refusal for each object that the tenant does not have, up to a maximum number. `missing` maps
    the pointer to the object in the body to its id."""
    for pointer, id in islice(missing.items(), _MOST_NAMED):
        yield Refusal("unknown-object", unknown_object(id, object_seconds), pointer)


def unknown_object(id: str, object_seconds: float) -> str:
    """Return the text that says that the tenant has no object with this id."""
    return (
        f'you have no object "{id[:100]}"; objects are kept for {object_seconds:g} seconds after their last '
        "use: upload it with POST /objects"
    )


def _no_secret(name: str, tenant: str, known: Collection[str]) -> str:
    others = ", ".join(list(known)[:_MOST_NAMED]) or "none yet"
    return (
        f'tenant "{tenant}" has no secret "{name[:100]}"; set it with `gpubroker secrets set NAME` (PUT '
        f"/secrets/NAME), or name one that it has: {others}"
    )
