"""The start and the end of queued inferences, which are tasks that an inference server answers.

A queued inference has no node and holds no memory; its model does. The inference is not placed: it runs once
its request is handed over for sending.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from gpubroker_server.core.domain.decisions import Decision, Request, write_move
from gpubroker_server.core.domain.model_orders import InferOrder
from gpubroker_server.core.domain.models import ModelKey
from gpubroker_server.core.domain.orders import Ended, Report
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Move, Task, TaskState, model_of
from gpubroker_server.core.domain.units import Fence, Instant, TaskId
from gpubroker_server.core.lifecycle import model_lifecycle
from gpubroker_server.core.lifecycle.stopping import after_stop, requeued_fields
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.tenants.fair_share import FairShares
from gpubroker_server.core.world.queue import Member, QueueGroup, Rank, TenantOrderKey
from gpubroker_server.core.world.world import World

PROCESS_GONE = "model_process_gone"
"""The failure kind of an inference whose model's process is gone, if the server has not noticed that."""


def servers_of(world: World, policy: Policy, model: str) -> tuple[str, ...]:
    """Return the servers that can answer for the model now; empty while it is not loaded."""
    held = holders(world, policy, model)
    if not held:
        return policy.serving.others
    return tuple(model_of(task).server for task in held if task.state is TaskState.RUNNING)


def holders(world: World, policy: Policy, model: str) -> list[Task]:
    """Return the tasks that hold the model, or wait to load it, on all servers."""
    tasks = (world.models.of(ModelKey(server, model)) for server in policy.serving.ledger)
    return [task for task in tasks if task is not None]


def waiting(world: World) -> dict[str, list[QueueGroup]]:
    """Return the groups of queued inferences that may be sent, by model."""
    by_model: dict[str, list[QueueGroup]] = {}
    for equivalence in world.queue.classes.values():
        if equivalence.demand.answered_by:
            priorities = (groups for band in equivalence.bands.values() for groups in band.values())
            groups = (group for same_priority in priorities for group in same_priority.values())
            by_model.setdefault(equivalence.demand.answered_by, []).extend(groups)
    return by_model


def admissions(world: World, policy: Policy, now: Instant) -> list[Decision]:
    """Return decisions that start queued inferences, for each loaded model up to `max_concurrent` of its
    server."""
    by_model = waiting(world)
    if not by_model:
        return []
    draft, shares = Draft(world), FairShares(world, policy, now)
    decisions: list[Decision] = []
    for model in sorted(by_model):
        servers = servers_of(world, policy, model)
        left = policy.serving.at_once - len(world.models.asking(model))
        if not servers or left <= 0:
            continue
        line = _ModelQueue(world, model, by_model[model], shares, policy, now)
        while left and (head := line.next()) is not None:
            task = world.tasks[head.member[1]]
            if draft.short_of(task, policy.custom_limits):
                continue  # this leaves out the whole group, whose tasks all lack it
            decision = _admit(world, task, servers, now)
            draft.replace_task(task, decision.tasks[0].task)
            decisions.append(decision)
            line.take(head)
            left -= 1
    return decisions


class _QueueHead(NamedTuple):
    place: tuple[int, Rank, int, TenantOrderKey]
    """The order of heads: the higher band, the rank of the tenant, the fewer running inferences of the
    tenant, then the queue order within the tenant."""
    member: Member
    group: QueueGroup


class _ModelQueue:
    """The inferences that wait for one model, in order, while some of them start."""

    def __init__(
        self,
        world: World,
        model: str,
        groups: list[QueueGroup],
        shares: FairShares,
        policy: Policy,
        now: Instant,
    ) -> None:
        self._given = Counter(task.tenant for task in world.models.asking(model).values())
        self._shares = shares
        self._policy = policy
        self._now = now
        self._heads = [self._head(group, group.member(0)) for group in groups]
        heapify(self._heads)

    def next(self) -> _QueueHead | None:
        """Return the next head. Its group yields no other head until `take`."""
        while self._heads:
            head = heappop(self._heads)
            fresh = self._head(head.group, head.member)
            if fresh.place == head.place:
                return head
            heappush(self._heads, fresh)  # the tenant was given something since this head was made
        return None

    def take(self, head: _QueueHead) -> None:
        self._given[head.group.tenant] += 1
        next_member = head.group.after(head.member)
        if next_member is not None:
            heappush(self._heads, self._head(head.group, next_member))

    def _head(self, group: QueueGroup, member: Member) -> _QueueHead:
        own_order, tenant = group.order_within_tenant(member, self._now, self._policy), group.tenant
        return _QueueHead(
            (own_order[0], self._shares.rank(tenant), self._given[tenant], own_order), member, group
        )


def _admit(world: World, task: Task, servers: Sequence[str], now: Instant) -> Decision:
    """Admit the inference. With several servers, each attempt goes to the next one."""
    fence = world.next_fence(task)
    # The fence rises with each attempt, so it also chooses the server.
    server = servers[task.fence % len(servers)]
    forgotten = {} if task.not_before is None else {"not_before": None}
    write = write_move(task, Move.STARTED, fence=fence, admitted_at=now, started_at=now, **forgotten)
    order = InferOrder(task.id, fence, server, task.demand.answered_by)
    return Decision(task.id, "infer", tasks=(write,), orders=(order,))


def keep_models_wanted(world: World, policy: Policy, now: Instant) -> list[Decision]:
    """Return the decisions that keep each model wanted at the highest priority of the inferences that wait
    for it or that it answers."""
    if not policy.serving.ledger:
        return []
    urgency = {
        model: max(task.priority for task in world.models.asking(model).values())
        for model in world.models.asked()
    }
    for model, groups in waiting(world).items():
        urgency[model] = max(urgency.get(model, 0), *(group.standing for group in groups))
    decisions = []
    for model in sorted(urgency):
        for holder in holders(world, policy, model):
            if model_lifecycle.needs_want_request(holder, urgency[model], now, queued=True):
                fields = {"priority": urgency[model], "queued": True}
                asked = Request("", holder.id, holder.tenant, "want", fields, now)
                decisions.append(
                    model_lifecycle.want(world, holder, asked, now, Decision(holder.id, "wanted"))
                )
    return decisions


def check_failed_models(
    world: World, reports: Iterable[Report], policy: Policy, now: Instant
) -> list[Decision]:
    """Return the decisions that have servers check the models whose process is reported gone, and reload them
    if it is."""
    models = {
        task.demand.answered_by
        for report in reports
        if isinstance(report, Ended) and report.failure is not None and report.failure.kind == PROCESS_GONE
        if (task := world.holder(report.task, report.fence)) is not None
    }
    decisions = []
    for holder in (holder for model in sorted(models) for holder in holders(world, policy, model)):
        fields = {"priority": model_of(holder).asked_priority, "uses": 0, "doubted": True}
        request = Request("", holder.id, holder.tenant, "want", fields, now)
        decisions.append(model_lifecycle.want(world, holder, request, now, Decision(holder.id, "doubted")))
    return decisions


def claims_at_takeover(world: World) -> frozenset[tuple[TaskId, Fence]]:
    """Return the running inferences that a new leader finds: their answers went to the previous leader."""
    active = (task for model in world.models.asked() for task in world.models.asking(model).values())
    return frozenset((task.id, task.fence) for task in active)


def requeue_claims(
    world: World, claims: frozenset[tuple[TaskId, Fence]], now: Instant, policy: Policy
) -> list[Decision]:
    """Return the decisions that requeue the claims which are still active, without using up a retry."""
    decisions = []
    for name, fence in sorted(claims):
        task = world.holder(name, fence)
        if task is None or not task.is_active:
            continue
        next_move, changes = Move.REQUEUED, requeued_fields(task)
        if task.state is TaskState.STOPPING:
            next_move, changes = after_stop(task, now, policy)
        decisions.append(Decision(name, "left_behind", tasks=(write_move(task, next_move, **changes),)))
    return decisions
