"""Rules for which model is in memory: the service's own, and two that users know."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf

from gpubroker_server.core.domain.decisions import Decision, Request
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.device import Device, DeviceSample, Node
from gpubroker_server.core.domain.holders import Model
from gpubroker_server.core.domain.model_orders import (
    IndexedModel,
    LoadOrder,
    ModelsInUse,
    ModelState,
    ServerIndex,
    UnloadOrder,
)
from gpubroker_server.core.domain.models import ModelKey
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, Position, Seconds, TaskId, device_key
from gpubroker_server.core.lifecycle.change_requests import carry_out
from gpubroker_server.core.lifecycle.deadlines import ObservationWindow, due, extend_window
from gpubroker_server.core.lifecycle.model_lifecycle import due as standings_due
from gpubroker_server.core.lifecycle.model_lifecycle import needs_want_request, seen
from gpubroker_server.core.lifecycle.model_turns import is_contended, turns
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.world.events import NewEvent, events_of, requested, submitted
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from bench.turns.replay import Lanes, Rule, Swap

LOOK_SECONDS = 0.1
"""The seconds between two looks of the service at the models in use while others wait. Here it plans as
often."""
PRIORITY = 70
MODEL_MB = Mib(18 * 1024)
WANTED_SECONDS = 300.0
"""The seconds for which a model is wanted after a request, as the service sets by default."""
FOREVER = Seconds(1e12)

SERVER = "main"
NODE = Node(NodeName("replay"), 64.0, Mib(65_536), 64, incarnation="1", boot_id="1")
DEVICE = Device(device_key("bench", NODE.name, "gpu0"), NODE.name, "gpu0", "gpu", 0, Mib(24 * 1024))
JUST_AFTER_SECONDS = 1e-6


class InOrder:
    """llama-swap's rule: requests are answered in the order in which they came, so every change of model is a
    swap."""

    keeps_order = True

    def decide(self, lanes: Lanes, _now: float) -> Sequence[Swap]:
        model = lanes.longest_waiting()
        if lanes.is_busy or model in ("", lanes.resident):
            return ()
        return [Swap(lanes.resident, loads=False)] if lanes.resident else [Swap(model, loads=True)]

    def next_at(self, _lanes: Lanes, _now: float) -> float:
        return inf

    def on_swapped(self, swap: Swap, now: float) -> None:
        """Do nothing: this rule sees the swap in the lanes."""


class WhileWanted:
    """Keeps a model until it was not requested for `wanted_seconds`; then loads the model that has waited
    longest."""

    keeps_order = False

    def decide(self, lanes: Lanes, now: float) -> Sequence[Swap]:
        model = lanes.longest_waiting(without=lanes.resident)
        if lanes.is_busy or not model:
            return ()
        if not lanes.resident:
            return [Swap(model, loads=True)]
        return [Swap(lanes.resident, loads=False)] if now >= self.next_at(lanes, now) else ()

    def next_at(self, lanes: Lanes, _now: float) -> float:
        return lanes.asked_at[lanes.resident] + WANTED_SECONDS if lanes.resident else inf

    def on_swapped(self, swap: Swap, now: float) -> None:
        """Do nothing: this rule sees the swap in the lanes."""


class Gpubroker:
    """The rule of the service's core."""

    keeps_order = False

    def __init__(self) -> None:
        self._policy = replace(Policy(), sample_period_seconds=FOREVER)
        self._watch: ObservationWindow | None = None
        self._looked_at = -inf
        self._requests = 0
        self.world = World()
        self.world.add_node(NODE)
        self.world.add_device(DEVICE)
        self._measure(0.0)

    def decide(self, lanes: Lanes, now: float) -> Sequence[Swap]:
        at = Instant(now)
        for model in sorted(lanes.in_use()):
            self._want(model, at)
        if now >= self._looked_at + LOOK_SECONDS:
            self._looked_at = now
            if is_contended(self.world, at, self._policy):
                in_use = ModelsInUse(lanes.in_use())
                self._commit(turns(self.world, in_use, at, self._policy), at)
            self._commit(due(self.world, at, self._policy, self._watch), at)
            self._commit(standings_due(self.world, at), at)
            self._watch = extend_window(self._watch, at)
        decisions = plan_cycle(self.world, self._policy, at).decisions
        self._commit(decisions, at)
        orders = [order for decision in decisions for order in decision.orders]
        return [
            Swap(order.model, loads=isinstance(order, LoadOrder))
            for order in orders
            if isinstance(order, LoadOrder | UnloadOrder)
        ]

    def next_at(self, lanes: Lanes, now: float) -> float:
        others = lanes.in_use() - {lanes.resident}
        return inf if lanes.is_busy or not others else now + LOOK_SECONDS

    def on_swapped(self, swap: Swap, now: float) -> None:
        ready = {swap.model: IndexedModel(swap.model, ModelState.READY)} if swap.loads else {}
        at = Instant(now)
        self._commit(seen(self.world, ServerIndex(SERVER, at, ready, frozenset()), at, self._policy), at)
        self._measure(now + JUST_AFTER_SECONDS)

    def _want(self, model: str, now: Instant) -> None:
        """Want the model as a gateway does for a request that waits or is sent."""
        task = self.world.models.of(ModelKey(SERVER, model))
        if task is None:
            terms = Model(SERVER, model, Seconds(WANTED_SECONDS), PRIORITY, now, sized=True)
            demand = Demand(gpus=1, gpu_mb=MODEL_MB)
            until = Instant(now + WANTED_SECONDS)
            id = TaskId(f"{model}-{self.world.position}")
            new = Task(id, "bench", model, PRIORITY, demand, now, holder=terms, expires_at=until)
            self._apply([submitted(new)], now)
        elif needs_want_request(task, PRIORITY, now):
            self._requests += 1
            fields = {"priority": PRIORITY, "uses": 1}
            request = Request(f"r{self._requests}", task.id, task.tenant, "want", fields, now)
            self._apply([requested(request)], now)
            self._commit([carry_out(self.world, request, now, self._policy)], now)

    def _measure(self, at: float) -> None:
        self.world.measure([DeviceSample(DEVICE.key, Instant(at), Mib(0), foreign_mb=Mib(0))])

    def _commit(self, decisions: Iterable[Decision], now: Instant) -> None:
        for decision in decisions:
            self._apply(events_of(decision), now)

    def _apply(self, events: Iterable[NewEvent], now: Instant) -> None:
        for event in events:
            self.world.apply([event.at(Position(self.world.position + 1), now)])


RULES: Mapping[str, Callable[[], Rule]] = {
    "gpubroker": Gpubroker,
    "in_order": InOrder,
    "while_wanted": WhileWanted,
}
