"""Find the blockers that keep a task from being placed now, the most structural first."""

from collections.abc import Iterable, Iterator, Sequence

from gpubroker.wire.explanations import Quota
from msgspec import Struct
from msgspec.structs import replace

from gpubroker_server.core.admission.feasibility import (
    check,
    check_priority,
    new_nodes_could_take,
    slot_text,
    waits_for_a_node,
)
from gpubroker_server.core.domain.device import Node
from gpubroker_server.core.domain.environment import EnvironmentState, NodeEnvironment
from gpubroker_server.core.domain.holders import Inference
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import needs_gpus
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import Task, TaskState, model_of, stop_notices
from gpubroker_server.core.domain.units import Instant, TaskId, in_gib, in_time, node_of
from gpubroker_server.core.explain.survey import OPEN, DeviceFinding, NodeFinding, Survey, Verdict
from gpubroker_server.core.planning.forecasts.forecast_rounds import ExpectedStart, expected_ready_at
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from gpubroker_server.core.planning.inferences import holders, servers_of, waiting
from gpubroker_server.core.planning.tenants.quota import Quotas
from gpubroker_server.core.world.ledger import DeviceLedger
from gpubroker_server.core.world.world import World

_SETTLED_BY_PLEDGES = frozenset({Reason.FRAGMENTED, Reason.WAITING_FOR_MEMORY, Reason.BEHIND_HIGHER_PRIORITY})
"""Reasons that are not given to a task with pledges: its explanation says when the pledged memory comes."""


class Blocker(Struct, frozen=True):
    reason: Reason
    message: str


def limit_blockers(survey: Survey) -> list[Blocker]:
    """Return the blockers for quotas and limits that are used up, whatever memory is free. A gang counts with
    all its ranks."""
    quota = quota_of(survey)
    short = [quota_text(quota)] if quota is not None and is_short(quota) else []
    return [*(Blocker(Reason.QUOTA_EXHAUSTED, message) for message in short), *_custom(survey)]


def room_blockers(survey: Survey, *, of_rank: bool = False) -> list[Blocker]:
    """Return everything that keeps the task from a placement; empty if there is a placement. With `of_rank`,
    the limits and the priority thresholds of custom resources are left out, because they hold for all ranks
    together."""
    if isinstance(survey.task.holder, Inference):
        reasons = inference_blockers(survey.draft.world, survey.task, survey.policy)
        return [*limit_blockers(survey), *(Blocker(reason, message) for reason, message in reasons)]
    demand, world = survey.task.demand, survey.draft.world
    devices = [ledger.device for ledger in world.ledgers.values()]
    refusal = check(demand, devices, world.nodes.values(), survey.policy)
    if refusal is not None and new_nodes_could_take(demand, survey.policy):
        refusal = replace(refusal, message=waits_for_a_node(refusal.message, survey.policy))
    if refusal is not None and refusal.code == "no-matching-device":
        return [Blocker(Reason.NO_MATCHING_DEVICE, refusal.message)]
    if not of_rank:
        refusal = refusal or check_priority(demand, survey.task.priority, survey.policy)
    if refusal is not None:
        return [Blocker(Reason.EXCEEDS_CAPACITY, refusal.message)]
    blockers = [] if of_rank else limit_blockers(survey)
    large_nodes = [node for node in survey.nodes if node.is_large_enough]
    structural = _structural(survey, large_nodes)
    if structural is not None:
        blockers.append(structural)
    else:
        blockers += _lack_of_room(survey, [node for node in large_nodes if _is_open(node, demand.gpus)])
    if blockers and survey.draft.pledges_of(survey.task.id):
        settled = (
            _SETTLED_BY_PLEDGES if needs_gpus(demand) else {*_SETTLED_BY_PLEDGES, Reason.CONCURRENCY_LIMITED}
        )
        blockers = [b for b in blockers if b.reason not in settled]
        blockers.append(waiting_for_preemption(survey))
    return sorted(blockers, key=lambda blocker: blocker.reason.tier)


def _lack_of_room(survey: Survey, nodes: list[NodeFinding]) -> Iterator[Blocker]:
    """Yield the kinds of room that are missing. `nodes` could take the task if they had room."""
    nodes_with_memory = [node for node in nodes if node.count(Verdict.FITS) >= survey.task.demand.gpus]
    if not any(node.has_headroom for node in nodes_with_memory or nodes):
        yield _no_headroom(survey, nodes_with_memory or nodes)
    if not nodes_with_memory:
        yield _no_memory(survey, nodes)


def task_label(other: TaskId, tenant: str, task: Task) -> str:
    """Return the name of another task in an answer about `task`: its id if both have the same tenant."""
    return other if tenant == task.tenant else "a task of another tenant"


def _is_open(node: NodeFinding, gpus: int) -> bool:
    """Return True if the node is usable and enough of its devices are open, with recent samples."""
    return node.is_usable and node.count(*OPEN) >= gpus


def _custom(survey: Survey) -> list[Blocker]:
    asked = dict(survey.task.demand.counted)
    return [
        Blocker(Reason.CONCURRENCY_LIMITED, _short_of(name, asked[name], survey.policy.limit_of(name) or 0.0))
        for name in survey.draft.short_of(survey.task, survey.policy.custom_limits)
    ]


def _short_of(name: str, asked: float, limit: float) -> str:
    if name.startswith(("label:", "tenant:")):
        return f"the limit of {limit:g} for {slot_text(name)} is reached"
    if ":" in name:
        return f"needs {asked:g} of {slot_text(name)}; too few of {limit:g} are left"
    return f"needs {asked:g} of {name!r}; too few of the cluster's {limit:g} are left"


def _structural(survey: Survey, nodes: list[NodeFinding]) -> Blocker | None:
    """Return the reason why none of `nodes`, which are large enough, can be used, whatever memory is free;
    None if one can."""
    if not survey.nodes:
        return Blocker(Reason.BACKEND_UNAVAILABLE, "no node has joined yet")
    if not any(node.node.ready for node in survey.nodes):
        return Blocker(
            Reason.BACKEND_UNAVAILABLE, f"no node answers ({_some(n.node.name for n in survey.nodes)})"
        )
    names = _some(node.node.name for node in nodes)
    if not any(node.node.ready for node in nodes):
        return Blocker(Reason.NO_MATCHING_DEVICE, f"the nodes that are large enough do not answer ({names})")
    if not any(node.is_usable for node in nodes):
        return _closed(survey, nodes, names)
    usable = [node for node in nodes if node.is_usable and node.devices]
    if usable and all(node.count(*OPEN) == 0 and node.count(Verdict.HELD_BACK) for node in usable):
        on_nodes = _some(node.node.name for node in usable)
        message = (
            f"background and idle work may take no more GPU memory now on {on_nodes}; see `gpubroker targets`"
        )
        return Blocker(Reason.BACKGROUND_LIMITED, message)
    if not any(_is_open(node, survey.task.demand.gpus) for node in nodes):
        if closed := _closed_gpus(nodes):
            return Blocker(Reason.GPU_CLOSED, f"GPUs that could take it are closed ({_some(closed)})")
        return Blocker(
            Reason.BACKEND_UNAVAILABLE, f"the memory use of the GPUs has not been reported lately ({names})"
        )
    return None


def _closed(survey: Survey, nodes: list[NodeFinding], names: str) -> Blocker:
    """Return the blocker for nodes that are large enough and of which none is usable."""
    unprepared = [finding.node for finding in nodes if finding.lacks_only_environment]
    if unprepared:
        message = preparing_text(unprepared, survey.task.demand.where.environment, survey.now)
        return Blocker(Reason.ENVIRONMENT_PREPARING, message)
    full = [f"{node.node.name}: {node.full_disk}" for node in nodes if node.full_disk]
    if full and not any(node.node.cordoned for node in nodes):
        message = f"the nodes that are large enough have a disk that is too full ({_some(full)})"
        return Blocker(Reason.DISK_FULL, message)
    state = "are cordoned" if all(node.node.cordoned for node in nodes) else "are cordoned or do not answer"
    return Blocker(Reason.NODE_CORDONED, f"the nodes that are large enough {state} ({names})")


def preparing_text(nodes: Iterable[Node], key: str, now: Instant) -> str:
    """Return the text that says how far these nodes are with an environment."""
    states = []
    for node in nodes:
        match node.environment(key):
            case NodeEnvironment(state=EnvironmentState.FAILED, message=message):
                states.append(f"it failed on {node.name}: {message.partition(chr(10))[0]}")
            case NodeEnvironment(step=step, since=since):
                states.append(f"{node.name} is {step} ({in_time(max(0.0, now - since))} so far)")
            case _:
                states.append(f"{node.name} has not begun")
    return f"its environment is being prepared: {_some(states)}"


def _closed_gpus(nodes: Iterable[NodeFinding]) -> list[str]:
    return [
        f"{finding.ledger.device.label}: {closure.reason}"
        for node in nodes
        for finding in node.devices
        if finding.verdict is Verdict.GPU_CLOSED and (closure := finding.ledger.device.closure)
    ]


def _no_headroom(survey: Survey, nodes: list[NodeFinding]) -> Blocker:
    """Return the blocker for nodes without enough CPU, host memory, run slots or custom resources. `nodes`
    are those with room on their devices or, if there are none, all that could take the task."""
    task, demand = survey.task, survey.task.demand
    rooms = {
        n.node.name: survey.draft.headroom(n.node.name, task=task.id, priority=task.priority) for n in nodes
    }
    best = max(rooms, key=lambda name: (rooms[name][:3], name))
    room = rooms[best]
    shortages = []
    if room.runs < 1:
        shortages.append("a run slot, and none is left")
    if room.cpu < demand.cpu:
        unit = "CPU" if demand.cpu == 1 else "CPUs"
        shortages.append(f"{demand.cpu:g} {unit}, of which {max(0.0, room.cpu):g} are left")
    if room.memory_mb < demand.memory_mb:
        left = in_gib(max(0, room.memory_mb), demand.memory_mb)
        shortages.append(
            f"{in_gib(demand.memory_mb, room.memory_mb)} of host memory, of which {left} are left"
        )
    asked, left_of = dict(demand.custom), dict(room.custom)
    shortages += [
        f"{asked[name]:g} of {name!r}, of which {max(0.0, left_of[name]):g} are left"
        for name in room.short_of(task)
    ]
    message = f"needs {'; '.join(shortages)} (on {best}, the node with the most CPU left)"
    return Blocker(Reason.CONCURRENCY_LIMITED, message)


def waiting_for_preemption(survey: Survey) -> Blocker:
    draft, task = survey.draft, survey.task
    pledges = draft.pledges_of(task.id)
    runs = map(draft.task, sorted(draft.world.active))
    victims = [  # runs that were asked to stop for the task, or to give up a rank for it
        task_label(run.id, run.tenant, task)
        for run in runs
        if any(preemptor == task.id for preemptor, _ in stop_notices(run))
    ]
    size = in_gib(sum(pledge.mb for pledge in pledges.values()))
    if needs_gpus(task.demand):
        pledged = f"{size} on {_some(draft.ledger(device).device.label for device in sorted(pledges))}"
    else:
        pledged = f"CPU and host memory of {_some(map(node_of, sorted(pledges)))}"
    event = f"{_some(victims)} to stop" if victims else "their memory to be released"
    left = max(pledge.deadline_at for pledge in pledges.values()) - survey.now
    due = f"within {in_time(left)}" if left > 0 else f"due {in_time(-left)} ago"
    return Blocker(
        Reason.WAITING_FOR_PREEMPTION, f"{pledged} are pledged to it; it waits for {event} ({due})"
    )


def _no_memory(survey: Survey, nodes: list[NodeFinding]) -> Blocker:
    """Return the blocker for a lack of GPU memory. `nodes` lack nothing else: none of them has enough devices
    with room."""
    gpus = survey.task.demand.gpus
    for node in nodes:
        if node.count(Verdict.FITS, Verdict.KEPT_FOR_OTHERS) >= gpus:
            return _kept_for_others(survey.task, node)
    devices = [finding for node in nodes for finding in node.open_devices]
    smallest = min(finding.need_mb or 0 for finding in devices)
    total = sum(finding.free_mb for finding in devices)
    largest = max(devices, key=lambda finding: (finding.free_mb, finding.ledger.device.key))
    block_text = f"{in_gib(largest.free_mb, smallest)} ({largest.ledger.device.label})"
    needs = _needs(survey, smallest, largest.free_mb) + _coming(survey, devices) + _not_whole(survey, devices)
    reason = Reason.WAITING_FOR_MEMORY if total < gpus * smallest else Reason.FRAGMENTED
    if gpus > 1:
        return Blocker(reason, f"{needs}; {_most_on_one_node(survey.task, nodes)}")
    if reason is Reason.WAITING_FOR_MEMORY:
        return Blocker(reason, f"{needs}; the largest free block is {block_text}")
    return Blocker(
        reason,
        f"{needs}; {in_gib(total, largest.free_mb)} are free in all, but the largest block is {block_text}",
    )


def _most_on_one_node(task: Task, nodes: list[NodeFinding]) -> str:
    """Return a text about the node with the most devices that fit. A demand for several devices is not helped
    by one large block."""
    best = max(nodes, key=lambda node: (node.count(Verdict.FITS), node.node.name))
    fitting = [device.ledger.device.label for device in best.devices if device.verdict is Verdict.FITS]
    device_names = f" ({_some(fitting)})" if fitting else ""
    free = "empty" if task.demand.takes_whole_devices else "with that much free"
    return f"no node has {f'more than {len(fitting)}' if fitting else 'one'} {free}{device_names}"


def _kept_for_others(task: Task, node: NodeFinding) -> Blocker:
    """Return the blocker for a node whose room is pledged to tasks of the same or higher priority."""
    kept_devices = [finding for finding in node.devices if finding.verdict is Verdict.KEPT_FOR_OTHERS]
    pledges = {
        pledge.preemptor: pledge for finding in kept_devices for pledge in finding.ledger.pledges.values()
    }
    device_names = _some(finding.ledger.device.label for finding in kept_devices)
    owners = _some(
        f"{task_label(pledge.preemptor, pledge.tenant, task)} (priority {pledge.priority})"
        for pledge in sorted(pledges.values(), key=lambda p: (-p.priority, p.preemptor))
    )
    return Blocker(Reason.BEHIND_HIGHER_PRIORITY, f"the free memory of {device_names} is pledged to {owners}")


def _needs(survey: Survey, smallest_mb: int, *beside_mb: int) -> str:
    gpus = survey.task.demand.gpus
    if survey.task.demand.takes_whole_devices:
        return "needs a whole GPU" if gpus == 1 else f"needs {gpus} whole GPUs of one node"
    each = "one GPU" if gpus == 1 else f"each of {gpus} GPUs of one node"
    return f"needs {in_gib(smallest_mb, *beside_mb)} on {each}"


def _coming(survey: Survey, devices: Iterable[DeviceFinding]) -> str:
    """Return a text that names a device on which enough memory is being released, so that no run is
    preempted; empty if there is none."""
    if survey.task.demand.gpus == 1:
        for finding in devices:
            soon_free_mb = finding.ledger.free_after_releases_mb(
                task=survey.task.id, priority=survey.task.priority
            )
            if soon_free_mb >= (finding.need_mb or 0):
                return f", which is being released on {finding.ledger.device.label}"
    return ""


def _not_whole(survey: Survey, devices: Iterable[DeviceFinding]) -> str:
    """Return a text about use without a lease that keeps the task from a whole GPU; empty if there is
    none."""
    if survey.task.demand.takes_whole_devices:
        for finding in devices:
            others = used_without_lease(finding.ledger)
            if others and finding.verdict is Verdict.NO_ROOM and not finding.ledger.holdings:
                label = finding.ledger.device.label
                return f", and of {label} {others}: end or declare them, or ask for a size (gpu_mb)"
    return ""


def used_without_lease(ledger: DeviceLedger) -> str:
    """Return a text about the memory of a device that is used without a lease; empty if none is."""
    parts = []
    if ledger.foreign_mb:
        parts.append(f"{in_gib(ledger.foreign_mb)} are used by processes outside gpubroker")
    if ledger.unexplained_mb:
        parts.append(f"{in_gib(ledger.unexplained_mb)} are used by unknown processes")
    return " and ".join(parts)


def _some(names: Iterable[str]) -> str:
    """Return at most three of the names, and the number of the others."""
    shown = list(names)
    rest = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return ", ".join(shown[:3]) + rest


def is_short(quota: Quota) -> bool:
    return quota.counts_mb > quota.left_mb


def quota_text(quota: Quota) -> str:
    """Return a text about the MiB that the task counts against its tenant's quota, and the MiB that the
    tenant may still take."""
    counts, left = quota.counts_mb, quota.left_mb
    guaranteed, used = quota.guaranteed_mb, quota.used_mb
    lent = f", with what cohort {quota.cohort} lends" if quota.cohort else ""
    return (
        f"counts {in_gib(counts, left)} against the quota of {quota.tenant}, which holds "
        f"{in_gib(used, guaranteed)}, is guaranteed {in_gib(guaranteed, used)}, and may take "
        f"{in_gib(left, counts)} more{lent}"
    )


def quota_of(survey: Survey) -> Quota | None:
    """Return the state of the tenant's quota and what the task counts against it; None for a task without
    GPUs, and for a tenant without a quota."""
    task, policy = survey.task, survey.policy
    if not any(part.gpus for part in task.demand.bundles or (task.demand,)):
        return None
    quotas = Quotas(survey.draft, policy)
    tenant_quota = quotas.of(task.tenant, task.priority, task.id) if policy.has_quotas else None
    if tenant_quota is None:
        return None
    return Quota(
        tenant=task.tenant,
        cohort=policy.tenant(task.tenant).cohort or None,
        guaranteed_mb=tenant_quota.guaranteed_mb,
        used_mb=tenant_quota.claimed_mb,
        borrowed_mb=tenant_quota.borrowed_mb,
        lent_mb=tenant_quota.lent_mb,
        left_mb=max(0, tenant_quota.left_mb),
        counts_mb=quotas.need_mb(task.demand),
    )


_MODEL_STATES = {
    TaskState.PENDING: "it waits for room",
    TaskState.ADMITTED: "it is being loaded",
    TaskState.STOPPING: "it is being unloaded",
}

_NOT_LOADED = "it is not loaded; the load is retried with growing pauses; see `gpubroker models`"


def inference_blockers(world: World, task: Task, policy: Policy) -> list[tuple[Reason, str]]:
    """Return the blockers of an inference; none if its model is in memory and takes one more inference."""
    model, serving = task.demand.answered_by, policy.serving
    if not serving.is_anywhere:
        return [(Reason.BACKEND_UNAVAILABLE, "no Triton server is configured; set triton.servers")]
    servers = servers_of(world, policy, model)
    if not servers:
        model_holders = holders(world, policy, model)
        does = _MODEL_STATES[model_holders[0].state] if model_holders else _NOT_LOADED
        return [(Reason.MODEL_LOADING, f"model {model} is not in memory: {does}")]
    if len(world.models.asking(model)) >= serving.at_once:
        message = f"model {model} is answering {serving.at_once} inferences, the most at once"
        return [(Reason.CONCURRENCY_LIMITED, message)]
    return []


def expected_send_at(
    world: World, task: Task, policy: Policy, forecasts: Sequence[Forecast], now: Instant
) -> ExpectedStart | None:
    """Return the time at which an inference that waits only for its model is likely to be sent: when the
    model is in memory. Returns None for a model without a recorded load time, and where other inferences must
    be answered first."""
    model = task.demand.answered_by
    if task.id not in world.queue or servers_of(world, policy, model):
        return None
    if sum(map(len, waiting(world)[model])) > policy.serving.at_once:
        return None
    timed = [holder for holder in holders(world, policy, model) if model_of(holder).load_seconds]
    starts = (expected_ready_at(world, holder, forecasts, now) for holder in timed)
    return min((start for start in starts if start is not None), default=None)
