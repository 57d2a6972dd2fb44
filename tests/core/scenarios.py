"""Random clusters and what may happen to them, for properties that must hold whatever happens."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gpubroker_server.core.domain.decisions import Decision, write_move
from gpubroker_server.core.domain.demand import PlacementConstraints
from gpubroker_server.core.domain.lease import LeaseState, move_lease
from gpubroker_server.core.domain.policy import CustomLimit, Policy, TenantPolicy
from gpubroker_server.core.domain.task import Dependency, Move, OnFailure, StopReason, Task, TaskState
from gpubroker_server.core.domain.units import Instant, Mib, Seconds
from gpubroker_server.core.lifecycle.deadlines import due
from gpubroker_server.core.world.background import BackgroundRoom
from gpubroker_server.core.world.dependencies import settle_dependencies
from gpubroker_server.core.world.world import World
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.builders import NOW, a_device, a_node, a_sample, a_task, a_world, commit, let_go, submit

POLICY = Policy(
    custom_limits=(
        CustomLimit("fpga", 2.0, per_node=True),
        CustomLimit("licence", 3.0),
        CustomLimit("seat", 2.0, priority_threshold=50),
        CustomLimit("label:team=*", 1.0),
        CustomLimit("pool:small:gpus", 2.0),
        CustomLimit("tenant:*", 4.0),
        CustomLimit("tenant:default", 3.0),
    ),
    preemption_budget=1,
    shield_seconds=Seconds(40.0),
    min_run_seconds=Seconds(20.0),
    streams=(("light", 0.5), ("main", 2.0)),
    tenants=(
        TenantPolicy("acme", "lab", Mib(40), weight=2.0),
        TenantPolicy("beta", "lab", Mib(60), borrow_mb=Mib(20)),
        TenantPolicy("solo", guaranteed_mb=Mib(50), weight=0.5),
        TenantPolicy("*", "lab", Mib(0)),
        TenantPolicy("default", weight=0.5),
    ),
    usage_half_life_seconds=Seconds(100.0),
    forecasts=3,
    consolidation=50,
    backfill_depth=2,
)

SIZES = (10, 20, 30, 50)
"""MiB: small numbers make small counter-examples."""

ZONE_A = (("zone", ("a",)),)

SHAPES: tuple[dict[str, Any], ...] = (
    *({"gpu_mb": size} for size in SIZES),
    *({"gpu_mb": size, "cpu": 1.0} for size in SIZES),
    {"gpus": 1},
    {"gpus": 2},
    {"gpus": 2, "gpu_mb": 20},
    {"gpus": 2, "gpu_mb": 30, "cpu": 2.0},
    {"gpu_mb": 20, "exclusive": True},
    {"gpu_fraction": 0.5},
    {"gpu_mb": 10, "custom": {"licence": 2.0}},
    {"gpu_mb": 20, "custom": {"fpga": 1.0}},
    {"gpu_mb": 10, "custom": {"fpga": 2.0, "seat": 1.0}},
    {"gpu_mb": 20, "where": PlacementConstraints(kinds=("big", "odd"))},
    {"gpu_mb": 20, "slots": (("label:team=a", 1.0), ("tenant:default", 1.0))},
    {"gpu_mb": 30, "slots": (("label:team=b", 1.0), ("tenant:other", 1.0))},
    {"gpus": 2, "gpu_mb": 10, "slots": (("pool:small:gpus", 2.0), ("tenant:default", 1.0))},
    {
        "gpus": 2,
        "gpu_mb": 20,
        "where": PlacementConstraints(prefer_kinds=("big", "small"), prefer_nodes=ZONE_A),
    },
    {"gpus": 1, "where": PlacementConstraints(min_power=2, nodes=(("node", ("n1", "n2")),))},
    {"cpu": 1.0, "where": PlacementConstraints(nodes=ZONE_A, min_device_mb=Mib(80))},
    {"gpu_mb": 20, "where": PlacementConstraints(devices=("gpu0", "gpu1"))},
    {"gpu_mb": 30, "where": PlacementConstraints(min_device_mb=Mib(80), prefer_nodes=(("node", ("n2",)),))},
    {"gpu_mb": 20, "placement": "spread"},
    {"cpu": 1.0},
    {"cpu": 2.0},
    {"cpu": 4.0, "memory_mb": 60},
    {"cpu": 1.0, "custom": {"licence": 2.0}},
    {"cpu": 2.0, "custom": {"licence": 1.0, "fpga": 1.0}},
    {"cpu": 2.0, "memory_mb": 40, "placement": "spread"},
)


TERMS: tuple[dict[str, Any], ...] = (
    *({} for _ in range(6)),
    {"after": (0,)},
    {"after": (0, 2)},
    {"after": (1, 3), "ignore": True},
    {"not_before": Instant(NOW + 30.0)},
    {"queue_ttl_seconds": Seconds(40.0), "expires_at": Instant(NOW + 40.0)},
    {"deadline_at": Instant(NOW + 60.0)},
)
"""When it may run, and for how long; `after`: which of its tenant's tasks that have not ended."""

ODDITIES = ("cordoned", "away", "stale", "foreign", "hidden", "unlisted")
"""What may be odd about a node; on the last two, use is by unknown processes, or cannot be attributed."""

HIDDEN_MB = 10


@st.composite
def clusters(draw: st.DrawFn) -> World:
    """One to three nodes of one or two devices; now and then something is odd about a node."""
    parts: list[Any] = []
    for number in range(1, draw(st.integers(1, 3)) + 1):
        node = f"n{number}"
        odd = draw(st.sampled_from(("", "", "", "", *ODDITIES)))
        parts.append(
            a_node(
                node,
                cpu=draw(st.sampled_from((2.0, 4.0, 8.0))),
                memory_mb=100,
                max_runs=draw(st.sampled_from((2, 4, 8))),
                cordoned=odd == "cordoned",
                ready=odd != "away",
                custom=(("fpga", draw(st.sampled_from((1.0, 2.0)))),),
                labels=(("zone", draw(st.sampled_from("ab"))),),
            )
        )
        for index in range(draw(st.integers(1, 2))):
            foreign = 10 if odd == "foreign" else 0
            size = draw(st.sampled_from((40, 80)))
            kinds = (("a big", 2, 3, ""), ("a small", 1, 0, ""), ("a small", 1, 0, "a GPU"))
            kind, power, context_mb, parent = draw(st.sampled_from(kinds))
            facts: dict[str, Any] = {"kind": kind, "power": power, "context_mb": context_mb, "parent": parent}
            device = a_device(
                f"gpu{index}", node, mb=size, reserve_mb=4, declared_foreign_mb=foreign, **facts
            )
            parts.append(device)
            if odd == "stale" and index == 0:
                parts.append(a_sample(device.key, NOW + 1.0))
            if odd in ("hidden", "unlisted"):
                parts.append(
                    a_sample(device.key, used_mb=HIDDEN_MB, foreign_mb=0 if odd == "hidden" else None)
                )
    world = a_world(*parts)
    world.accounts.half_life_seconds = Seconds(100.0)
    for ledger in world.ledgers.values():
        if ledger.sample is not None and ledger.sampled_at != NOW:
            ledger.sample = replace(ledger.sample, at=Instant(NOW - 60.0))
    return world


@st.composite
def submissions(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "priority": draw(st.sampled_from((5, 20, 50, 60, 80, 95))),
        "submitted_at": NOW - draw(st.sampled_from((0, 10, 900))),
        "grace_seconds": draw(st.sampled_from((5.0, 30.0))),
        "tenant": draw(st.sampled_from(("default", "acme", "beta", "solo", "guest"))),
        "stream": draw(st.sampled_from(("", "", "light", "main"))),
        "expected_seconds": draw(st.sampled_from((None, 10.0, 60.0, 300.0))),
        "timeout_seconds": draw(st.sampled_from((None, None, 100.0))),
        "preemptions": draw(st.sampled_from((0, 0, 1))),
        **draw(st.sampled_from(TERMS)),
        **draw(st.sampled_from(SHAPES)),
    }


ACTS = (
    *("start", "start", "leave", "leave", "end", "fail", "cancel", "quarantine"),
    *("hold", "delay", "change", "save", "wait", "control"),
)

Chapter = tuple[list[dict[str, Any]], list[tuple[str, int]]]
"""What is submitted, and what then happens; after that the planner has its turn."""

stories: st.SearchStrategy[list[Chapter]] = st.lists(
    st.tuples(
        st.lists(submissions(), min_size=1, max_size=4),
        st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 7)), min_size=2, max_size=6),
    ),
    min_size=4,
    max_size=8,
)


@dataclass
class Story:
    """A cluster to which things happen."""

    world: World
    now: float = NOW
    number: int = 0

    def happens(self, chapter: Chapter) -> Iterator[None]:
        """Tell one chapter, pausing after each thing that happened."""
        submitted, acts = chapter
        for fields in submitted:
            self.submit(fields)
            yield
        for what, pick in acts:
            self.act(what, pick)
            yield

    def submit(self, fields: dict[str, Any]) -> None:
        self.number += 1
        fields = dict(fields)
        picks, how = fields.pop("after", ()), OnFailure("ignore" if fields.pop("ignore", False) else "fail")
        there = [t.id for t in self.world.tasks.values() if not t.is_terminal]
        mine = sorted(name for name in there if self.world.tasks[name].tenant == fields["tenant"])
        after = tuple(
            Dependency(name, how) for name in sorted({mine[pick % len(mine)] for pick in picks if mine})
        )
        submit(self.world, a_task(f"t{self.number:02}", after=after, awaits=bool(after), **fields))

    def act(self, what: str, pick: int) -> None:
        match what:
            case "wait":
                self.now += 25.0
                self._sample()
                commit(self.world, due(self.world, Instant(self.now), POLICY, None), self.now)
            case "leave":
                if gone := self._some(pick, TaskState.STOPPING):
                    let_go(self.world, gone.id)
                elif run := self._over(pick):
                    let_go(self.world, run)
            case "control":
                weights = {"light": 3.0} if pick % 2 else {}
                self.world.control(background(self.world, pick), {}, weights)
            case _:
                self._change(what, pick)
        while decisions := settle_dependencies(self.world.awaited, self.world.tasks, Instant(self.now)):
            commit(self.world, decisions)
        self.measure()

    def measure(self) -> None:
        """Where use is not attributed, it is that of a stranger and of the runs that have begun."""
        for ledger in self.world.ledgers.values():
            if ledger.sample is not None and ledger.sample.foreign_mb is None:
                leases = [holding.lease for holding in ledger.holdings.values()]
                begun = sum(lease.mb for lease in leases if lease.state is not LeaseState.RESERVED)
                self.world.measure([replace(ledger.sample, used_mb=Mib(HIDDEN_MB + begun))])

    def _change(self, what: str, pick: int) -> None:
        """Move one task in the way that is asked for, if there is one that can."""
        now = Instant(self.now)
        match what:
            case "start" if task := self._some(pick, TaskState.ADMITTED):
                self._move(task, Move.STARTED, LeaseState.HELD, started_at=now)
            case "end" if task := self._some(pick, TaskState.RUNNING):
                self._move(task, Move.SUCCEEDED, LeaseState.RELEASING, finished_at=now)
            case "fail" if task := self._some(pick, TaskState.RUNNING):
                self._move(task, Move.FAILED, LeaseState.RELEASING, finished_at=now)
            case "change" if task := self._some(pick, TaskState.PENDING):
                self._move(task, Move.CHANGED, None, priority=(task.priority * 7 + 11) % 101)
            case "cancel" if task := self._some(pick, TaskState.RUNNING, TaskState.ADMITTED):
                until = Instant(now + 30.0)
                self._move(task, Move.STOPPING, None, stop_reason=StopReason.CANCEL, stop_deadline_at=until)
            case "quarantine" if task := self._some(pick, TaskState.STOPPING):
                off = {"node": None, "stop_reason": None, "stop_deadline_at": None, "freeing_for": None}
                spent = task.preemptions + 1
                self._move(task, Move.REQUEUED, LeaseState.QUARANTINED, preemptions=spent, **off)
            case "hold" if task := self._some(pick, TaskState.PENDING):
                self._move(task, Move.CHANGED, None, held=not task.held)
            case "delay" if task := self._some(pick, TaskState.PENDING):
                self._move(task, Move.CHANGED, None, not_before=Instant(now + 20.0))
            case "save" if task := self._some(pick, TaskState.RUNNING):
                self._move(task, Move.CHANGED, None, checkpoint_at=now)

    def _move(self, task: Task, what: Move, leases: LeaseState | None, **changes: Any) -> None:
        moved = [move_lease(ls, leases) for ls in self.world.leases_of(task)] if leases else []
        writes = (write_move(task, what, **changes),)
        commit(self.world, Decision(task.id, "story", tasks=writes, leases=tuple(moved)))

    def _some(self, pick: int, *states: TaskState) -> Task | None:
        found = sorted(t.id for t in self.world.tasks.values() if t.state in states)
        return self.world.tasks[found[pick % len(found)]] if found else None

    def _over(self, pick: int) -> str | None:
        """An ended run with memory that is being freed."""
        found = sorted(t.id for t in self.world.tasks.values() if t.is_terminal)
        return found[pick % len(found)] if found else None

    def _sample(self) -> None:
        for ledger in self.world.ledgers.values():
            if ledger.sample is not None and ledger.sample.at >= NOW:
                self.world.measure([replace(ledger.sample, at=Instant(self.now))])


def background(world: World, pick: int) -> BackgroundRoom:
    """What background work may take: little or nothing of the fleet, or of its first node."""
    first = min(world.nodes)
    scopes = {node: ("all", "first") if node == first else ("all",) for node in world.nodes}
    return BackgroundRoom({"all": (0, 30, 60, 999)[pick % 4], "first": (0, 20, 999)[pick % 3]}, scopes)


def twin(world: World, seed: int) -> World:
    """The same rows in a World of their own, entered in another order."""
    shuffle = random.Random(seed).shuffle
    other = World()
    other.position, other.as_of = world.position, world.as_of
    copied: tuple[tuple[list[Any], Callable[[Any], object]], ...] = (
        (list(world.nodes.values()), other.add_node),
        ([ledger.device for ledger in world.ledgers.values()], other.add_device),
        (list(world.tasks.values()), other.add_task),
        ([lease for run in world.leases.values() for lease in run.values()], other.add_lease),
        ([pledge for mine in world.pledges.values() for pledge in mine.values()], other.add_pledge),
    )
    for rows, add in copied:
        shuffle(rows)
        for row in rows:
            add(row)
    other.mix = world.mix
    other.accounts.half_life_seconds = world.accounts.half_life_seconds
    for usage in world.accounts.rows():
        other.accounts.restore(usage)
    other.control(world.background.copy(), world.full_disks, world.queue.stream_weights)
    other.measure(ledger.sample for ledger in world.ledgers.values() if ledger.sample is not None)
    return other
