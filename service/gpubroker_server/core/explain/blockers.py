"""What keeps a task from being placed right now, most structural first, in words for people."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import Task, TaskState, notices_of
from gpubroker_server.core.domain.units import Instant, TaskId, in_gib
from gpubroker_server.core.explain.admission import check, check_priority, slot_in_words
from gpubroker_server.core.explain.survey import OPEN, DeviceFinding, NodeFinding, Survey, Verdict
from gpubroker_server.core.planning.forecasts.forecast_rounds import ExpectedStart, expected_ready_at
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from gpubroker_server.core.planning.inferences import holders, servers_of, waiting
from gpubroker_server.core.planning.tenants.quota import Allowance, Quotas
from gpubroker_server.core.world.ledger import Book
from gpubroker_server.core.world.world import World

_SETTLED_BY_PLEDGES = frozenset({Reason.FRAGMENTED, Reason.WAITING_FOR_MEMORY, Reason.BEHIND_HIGHER_PRIORITY})
"""Memory is on its way to a task that has pledges; it need not hear that there is none."""


@dataclass(frozen=True, slots=True)
class Blocker:
    reason: Reason
    message: str

    @property
    def tier(self) -> int:
        return self.reason.tier


def limit_blockers(seen: Survey) -> list[Blocker]:
    """The limits that keep it waiting whatever is free; of a gang they count over all ranks."""
    quota = quota_of(seen)
    short = [quota.message] if quota is not None and quota.is_short else []
    return [*(Blocker(Reason.QUOTA_EXHAUSTED, message) for message in short), *_custom(seen)]


def room_blockers(seen: Survey, *, of_rank: bool = False) -> list[Blocker]:
    """Everything that stands between the task and a placement; empty if there is one. Of a rank without the
    limits that count over all."""
    if seen.task.is_inference:
        why = why_not_sent(seen.draft.world, seen.task, seen.policy)
        return [*limit_blockers(seen), *(Blocker(reason, message) for reason, message in why)]
    demand, world = seen.task.demand, seen.draft.world
    devices = [book.device for book in world.books.values()]
    refusal = check(demand, devices, world.nodes.values(), seen.policy)
    if refusal is not None and refusal.code == "no-matching-device":
        return [Blocker(Reason.NO_MATCHING_DEVICE, refusal.message)]
    refusal = refusal or check_priority(demand, seen.task.priority, seen.policy)
    if refusal is not None:
        return [Blocker(Reason.EXCEEDS_CAPACITY, refusal.message)]
    blockers = [] if of_rank else limit_blockers(seen)
    large = [node for node in seen.nodes if node.is_large_enough]
    structural = _structural(seen, large)
    if structural is not None:
        blockers.append(structural)
    else:
        blockers += _lack_of_room(seen, [node for node in large if _is_open(node, demand.gpus)])
    if blockers and seen.draft.pledges_of(seen.task.id):
        blockers = [b for b in blockers if b.reason not in _SETTLED_BY_PLEDGES]
        blockers.append(waiting_for_preemption(seen))
    return sorted(blockers, key=lambda blocker: blocker.tier)


def _lack_of_room(seen: Survey, nodes: list[NodeFinding]) -> Iterator[Blocker]:
    """`nodes`: those that could take the task if they had room."""
    roomy = [node for node in nodes if node.count(Verdict.FITS) >= seen.task.demand.gpus]
    if not any(node.has_headroom for node in roomy or nodes):
        yield _no_headroom(seen, roomy or nodes)
    if not roomy:
        yield _no_memory(seen, nodes)


def called(other: TaskId, tenant: str, task: Task) -> str:
    """What people who ask about `task` may call another one: its id, if it is of the same tenant."""
    return other if tenant == task.tenant else "a task of another tenant"


def _is_open(node: NodeFinding, gpus: int) -> bool:
    """Usable, and its devices are known well enough."""
    return node.is_usable and node.count(*OPEN) >= gpus


def _custom(seen: Survey) -> list[Blocker]:
    asked = dict(seen.task.demand.counted)
    return [
        Blocker(Reason.CONCURRENCY_LIMITED, _short_of(name, asked[name], seen.policy.limit_of(name) or 0.0))
        for name in seen.draft.short_of(seen.task, seen.policy.custom_limits)
    ]


def _short_of(name: str, asked: float, limit: float) -> str:
    if ":" in name:
        return f"needs {asked:g} of {slot_in_words(name)}; of {limit:g} too few are left"
    return f"needs {asked:g} of {name!r}; of the cluster's {limit:g} too few are left"


def _structural(seen: Survey, nodes: list[NodeFinding]) -> Blocker | None:
    """`nodes`: those large enough. Why not one of them can be used, whatever is free on it."""
    if not seen.nodes:
        return Blocker(Reason.BACKEND_UNAVAILABLE, "no node has joined yet")
    if not any(node.node.ready for node in seen.nodes):
        return Blocker(
            Reason.BACKEND_UNAVAILABLE, f"no node answers ({_some(n.node.name for n in seen.nodes)})"
        )
    names = _some(node.node.name for node in nodes)
    if not any(node.node.ready for node in nodes):
        return Blocker(Reason.NO_MATCHING_DEVICE, f"the nodes that are large enough do not answer ({names})")
    if not any(node.is_usable for node in nodes):
        return Blocker(
            Reason.NO_MATCHING_DEVICE,
            f"the nodes that are large enough are cordoned or do not answer ({names})",
        )
    if not any(_is_open(node, seen.task.demand.gpus) for node in nodes):
        return Blocker(
            Reason.BACKEND_UNAVAILABLE, f"the memory use of the GPUs has not been reported lately ({names})"
        )
    return None


def _no_headroom(seen: Survey, nodes: list[NodeFinding]) -> Blocker:
    """`nodes`: those with room on their devices, if there are any."""
    task, demand = seen.task, seen.task.demand
    rooms = {
        n.node.name: seen.draft.headroom(n.node.name, task=task.id, priority=task.priority) for n in nodes
    }
    best = max(rooms, key=lambda name: (rooms[name][:3], name))
    room = rooms[best]
    short = []
    if room.runs < 1:
        short.append("a run slot, and none is left")
    if room.cpu < demand.cpu:
        unit = "CPU" if demand.cpu == 1 else "CPUs"
        short.append(f"{demand.cpu:g} {unit}, of which {max(0.0, room.cpu):g} are left")
    if room.memory_mb < demand.memory_mb:
        left = in_gib(max(0, room.memory_mb))
        short.append(f"{in_gib(demand.memory_mb)} of host memory, of which {left} are left")
    asked, left_of = dict(demand.custom), dict(room.custom)
    short += [
        f"{asked[name]:g} of {name!r}, of which {max(0.0, left_of[name]):g} are left"
        for name in room.short_of(task)
    ]
    message = f"needs {'; '.join(short)} (on {best}, the node with the most CPU left)"
    return Blocker(Reason.CONCURRENCY_LIMITED, message)


def waiting_for_preemption(seen: Survey) -> Blocker:
    draft, task = seen.draft, seen.task
    pledges = draft.pledges_of(task.id)
    runs = map(draft.task, sorted(draft.world.active))
    victims = [called(run.id, run.tenant, task) for run in runs if _frees_for(run, task)]
    size = in_gib(sum(pledge.mb for pledge in pledges.values()))
    where = _some(draft.book(device).device.label for device in sorted(pledges))
    who = f"{_some(victims)} to stop" if victims else "what is leaving to be gone"
    left = max(pledge.deadline_at for pledge in pledges.values()) - seen.now
    when = f"within {left:.0f} s" if left > 0 else f"due {-left:.0f} s ago"
    return Blocker(
        Reason.WAITING_FOR_PREEMPTION, f"{size} on {where} are kept for it; waits for {who} ({when})"
    )


def _frees_for(run: Task, task: Task) -> bool:
    """Whether it, or a rank of it, was asked to leave for that task."""
    return any(whom == task.id for whom, _ in notices_of(run))


def _no_memory(seen: Survey, nodes: list[NodeFinding]) -> Blocker:
    """`nodes`: those that nothing but memory keeps it from. None has enough devices with room."""
    gpus = seen.task.demand.gpus
    for node in nodes:
        if node.count(Verdict.FITS, Verdict.KEPT_FOR_OTHERS) >= gpus:
            return _kept_for_others(seen.task, node)
    devices = [finding for node in nodes for finding in node.open_devices]
    smallest = min(finding.need_mb or 0 for finding in devices)
    total = sum(finding.free_mb for finding in devices)
    largest = max(devices, key=lambda finding: (finding.free_mb, finding.book.device.key))
    block = f"{in_gib(largest.free_mb)} ({largest.book.device.label})"
    needs = _needs(seen, smallest) + _coming(seen, devices) + _not_whole(seen, devices)
    reason = Reason.WAITING_FOR_MEMORY if total < gpus * smallest else Reason.FRAGMENTED
    if gpus > 1:
        return Blocker(reason, f"{needs}; {_most_on_one_node(seen.task, nodes)}")
    if reason is Reason.WAITING_FOR_MEMORY:
        return Blocker(reason, f"{needs}; the largest free block is {block}")
    return Blocker(reason, f"{needs}; {in_gib(total)} are free in all, but the largest block is {block}")


def _most_on_one_node(task: Task, nodes: list[NodeFinding]) -> str:
    """For a demand of several devices: how near the best node comes, since one large block is no help."""
    best = max(nodes, key=lambda node: (node.count(Verdict.FITS), node.node.name))
    fitting = [one.book.device.label for one in best.devices if one.verdict is Verdict.FITS]
    where = f" ({_some(fitting)})" if fitting else ""
    free = "empty" if task.demand.takes_whole_devices else "with that much free"
    return f"no node has {f'more than {len(fitting)}' if fitting else 'one'} {free}{where}"


def _kept_for_others(task: Task, node: NodeFinding) -> Blocker:
    """There is room on this node, but pledges that the task must respect have it."""
    kept = [finding for finding in node.devices if finding.verdict is Verdict.KEPT_FOR_OTHERS]
    pledges = {pledge.preemptor: pledge for finding in kept for pledge in finding.book.pledges.values()}
    where = _some(finding.book.device.label for finding in kept)
    who = _some(
        f"{called(pledge.preemptor, pledge.tenant, task)} (priority {pledge.priority})"
        for pledge in sorted(pledges.values(), key=lambda p: (-p.priority, p.preemptor))
    )
    return Blocker(Reason.BEHIND_HIGHER_PRIORITY, f"what is free on {where} is kept for {who}")


def _needs(seen: Survey, smallest_mb: int) -> str:
    gpus = seen.task.demand.gpus
    if seen.task.demand.takes_whole_devices:
        return "needs a whole GPU" if gpus == 1 else f"needs {gpus} whole GPUs of one node"
    each = "one GPU" if gpus == 1 else f"each of {gpus} GPUs of one node"
    return f"needs {in_gib(smallest_mb)} on {each}"


def _coming(seen: Survey, devices: Iterable[DeviceFinding]) -> str:
    """Why nobody is stopped for it: room on one device that somebody is leaving anyway."""
    if seen.task.demand.gpus == 1:
        for finding in devices:
            soon = finding.book.soon_mb(task=seen.task.id, priority=seen.task.priority)
            if soon >= (finding.need_mb or 0):
                return f", which is being released on {finding.book.device.label}"
    return ""


def _not_whole(seen: Survey, devices: Iterable[DeviceFinding]) -> str:
    """What keeps a GPU on which nobody has a lease from being had whole."""
    if seen.task.demand.takes_whole_devices:
        for finding in devices:
            others = used_by_others(finding.book)
            if others and finding.verdict is Verdict.NO_ROOM and not finding.book.holdings:
                where = finding.book.device.label
                return f", and of {where} {others}: end or declare those, or ask for a size (gpu_mb)"
    return ""


def used_by_others(book: Book) -> str:
    """How much of a device goes to whom no lease is for; empty if nothing does."""
    parts = []
    if book.foreign_mb:
        parts.append(f"{in_gib(book.foreign_mb)} go to processes that are not ours")
    if book.unexplained_mb:
        parts.append(f"{in_gib(book.unexplained_mb)} are in use by nobody who is known")
    return " and ".join(parts)


def _some(names: Iterable[str]) -> str:
    """At most three names, and how many more there are."""
    shown = list(names)
    rest = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return ", ".join(shown[:3]) + rest


@dataclass(frozen=True, slots=True)
class QuotaStanding:
    tenant: str
    cohort: str
    """Empty: nobody lends it anything."""
    allowance: Allowance
    counts_mb: int
    """What the task would count: on the largest GPUs that it may use; of a gang, its least ranks."""

    @property
    def is_short(self) -> bool:
        return self.counts_mb > self.allowance.left_mb

    @property
    def message(self) -> str:
        found = self.allowance
        borrows = f" and borrows from cohort {self.cohort}" if self.cohort else ""
        return (
            f"counts {in_gib(self.counts_mb)}; tenant {self.tenant}, which is guaranteed "
            f"{in_gib(found.guaranteed_mb)}{borrows}, has {in_gib(found.claimed_mb)} and may take "
            f"{in_gib(max(0, found.left_mb))} more"
        )


def quota_of(seen: Survey) -> QuotaStanding | None:
    """None for a task without GPUs, and for a tenant without a quota."""
    task, policy = seen.task, seen.policy
    if not any(part.gpus for part in task.demand.bundles or (task.demand,)):
        return None
    quotas = Quotas(seen.draft, policy)
    allowance = quotas.of(task.tenant, task.priority, task.id) if policy.has_quotas else None
    if allowance is None:
        return None
    return QuotaStanding(
        task.tenant, policy.tenant(task.tenant).cohort, allowance, quotas.need_mb(task.demand)
    )


_DOES = {
    TaskState.PENDING: "it waits for its room",
    TaskState.ADMITTED: "it is being loaded",
    TaskState.STOPPING: "it is being unloaded",
}

_IS_NOWHERE = (
    "it was not brought, or has left, and is asked for again, each time later; `gpubroker models` says how "
    "its last load ended"
)


def why_not_sent(world: World, task: Task, policy: Policy) -> list[tuple[Reason, str]]:
    """Nothing if its model is there and takes one more."""
    model, serving = task.demand.answered_by, policy.serving
    if not serving.is_anywhere:
        return [(Reason.BACKEND_UNAVAILABLE, "there is no server of models (any more); set triton.servers")]
    servers = servers_of(world, policy, model)
    if not servers:
        held = holders(world, policy, model)
        does = _DOES[held[0].state] if held else _IS_NOWHERE
        return [(Reason.MODEL_LOADING, f"model {model} is not in memory: {does}")]
    if len(world.homes.asking(model)) >= serving.at_once:
        message = f"{serving.at_once} inferences of model {model} are being answered, and no more at once"
        return [(Reason.CONCURRENCY_LIMITED, message)]
    return []


def sent_at(
    world: World, task: Task, policy: Policy, forecasts: Sequence[Forecast], now: Instant
) -> ExpectedStart | None:
    """When one that waits for nothing but its model is likely to be sent: when that is in memory. None if
    nobody can tell: of a model that was never loaded, and of one for which others must have been answered
    first, since how long answers take is not known."""
    model = task.demand.answered_by
    if task.id not in world.queue or servers_of(world, policy, model):
        return None
    if sum(map(len, waiting(world)[model])) > policy.serving.at_once:
        return None
    timed = [one for one in holders(world, policy, model) if one.model is not None and one.model.load_seconds]
    starts = (expected_ready_at(world, one, forecasts, now) for one in timed)
    return min((start for start in starts if start is not None), default=None)
