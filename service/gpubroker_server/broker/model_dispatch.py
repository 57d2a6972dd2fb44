"""Sends orders to model servers, several at once unless they conflict, and reads the servers' indexes.

A model server checks no fence: it carries out every call, however late the call arrives. So a leader sends
nothing after its term, a new leader waits until the calls of the earlier one have arrived, and only the index
of a server says which models it has.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import structlog
from msgspec import Struct

from gpubroker_server.core.domain.leader_term import LeaderTerm
from gpubroker_server.core.domain.model_orders import (
    CheckOrder,
    LoadOrder,
    ModelOrder,
    ModelState,
    ServerIndex,
    UnloadOrder,
    is_in_the_way,
)
from gpubroker_server.core.domain.orders import Ended, Ending, Failure, Report
from gpubroker_server.core.domain.units import Fence, Seconds, TaskId, mark_of
from gpubroker_server.ports.models import HostFault, HostRefused, Index, ModelHost
from gpubroker_server.ports.store import Clock, ReadTicks

log = structlog.get_logger("gpubroker.tasks.task")

Hear = Callable[[Sequence[Report]], None]
Claim = tuple[TaskId, Fence]
HaveLetGo = Callable[[str], Awaitable[bool]]
"""Returns True if no gateway uses a claim any more. The argument is its `mark_of`."""

LOADS_AT_ONCE = 4
"""The number of loads that a server carries out at once. It is Triton's default
(`--model-load-thread-count`)."""

_MESSAGES = {
    HostFault.NOT_FOUND: "the server has no such model",
    HostFault.OUT_OF_MEMORY: "the server could not get the memory for it",
    HostFault.FAILED: "the server failed to load it",
    HostFault.OTHER_GPUS: "the server does not use the GPUs of its lease",
    HostFault.NOT_ALLOWED: "the server loads no models itself; start it with --model-control-mode=explicit",
}


class ModelDispatchRules(Struct, frozen=True):
    look_seconds: Seconds = Seconds(2.0)
    """The longest time between two reads of an index."""
    busy_look_seconds: Seconds = Seconds(0.25)
    """The longest time between two reads of an index while an order is under way."""
    call_seconds: Seconds = Seconds(10.0)
    """The timeout of calls other than loads."""
    load_seconds: Seconds = Seconds(600.0)
    """The timeout of a load. After it, the index shows the result of the load."""
    gone_seconds: Seconds = Seconds(3.0)
    """The longest wait for the unload of a model whose process is dead. Then the model is loaded again
    anyway."""
    loads_at_once: Mapping[str, int] = {}
    """The number of loads at once of each server that does not use LOADS_AT_ONCE."""
    drain_look_seconds: Seconds = Seconds(0.05)
    """The time between two checks whether gateways still use a model that is to be unloaded. After the grace
    period of the order the model is unloaded anyway; the server finishes the requests that it has."""


async def _no_gateways(_claim: str) -> bool:
    return True


class ModelDispatcher:
    """Sends orders to model servers for one leader, during one term."""

    def __init__(
        self,
        hosts: Iterable[ModelHost],
        clock: Clock,
        ticks: ReadTicks,
        rules: ModelDispatchRules | None = None,
        wait_seconds: Seconds = Seconds(0.0),
        have_let_go: HaveLetGo = _no_gateways,
        watches: Sequence[Callable[[Hear], Coroutine[Any, Any, None]]] = (),
    ) -> None:
        """`wait_seconds` is the time for which calls of an earlier leader may still be under way. `watches`
        are coroutines that run beside the calls and make reports of their own."""
        self._watches = watches
        self._clock = clock
        self._ticks = ticks
        self._wait_seconds = wait_seconds
        self._unheard: list[Report] = []
        self._hear: Hear = self._unheard.extend
        under_way: list[ModelOrder] = []
        self._queues = {
            host.name: _ServerQueue(
                host,
                clock,
                rules or ModelDispatchRules(),
                under_way,
                self._begin,
                self._may_send,
                have_let_go,
            )
            for host in hosts
        }
        self._leader_term: LeaderTerm | None = None

    async def run(self, leader_term: LeaderTerm, hear: Hear) -> None:
        """Send orders to model servers until cancelled. `hear` receives the reports."""
        self._leader_term, self._hear = leader_term, hear
        if self._unheard:
            hear(self._unheard)
        await asyncio.sleep(self._wait_seconds if self._queues else 0.0)
        async with asyncio.TaskGroup() as group:
            for queue in self._queues.values():
                group.create_task(queue.keep(hear))
            for watch in self._watches:
                group.create_task(watch(hear))

    def send(self, order: ModelOrder) -> None:
        """Queue a committed order."""
        queue = self._queues.get(order.server)
        if queue is not None:
            queue.take(order)
        elif isinstance(order, LoadOrder):
            message = f"no model server {order.server!r} is configured; add it to triton.servers"
            failure = Failure("load_failed", message)
            self._hear([_ended(order, self._clock, Ending.FAILED, failure)])

    def _begin(self) -> None:
        """Wake all queues after an order has ended: orders of other servers on the same devices may begin
        too."""
        for queue in self._queues.values():
            queue.wake()

    def _may_send(self) -> bool:
        return self._leader_term is not None and not self._leader_term.is_over(self._ticks())


class _Leaving(NamedTuple):
    order: UnloadOrder
    until: float
    """The deadline on the loop's clock. After it the model is unloaded even if a gateway still uses it."""


@dataclass(eq=False)
class _ServerQueue:
    """Carries out the orders of one server and reads its index."""

    host: ModelHost
    clock: Clock
    rules: ModelDispatchRules
    under_way: list[ModelOrder]
    """The orders of all servers that are being carried out. It is shared, because two servers may share a
    device."""
    on_end: Callable[[], None]
    may_send: Callable[[], bool]
    have_let_go: HaveLetGo

    def __post_init__(self) -> None:
        self._loads_at_once = self.rules.loads_at_once.get(self.host.name, LOADS_AT_ONCE)
        self._leaving: dict[Claim, _Leaving] = {}
        """The unloads that wait until no gateway uses the model any more."""
        self._left = asyncio.Event()
        self._waiting: list[ModelOrder] = []
        self._woken = asyncio.Event()
        self._done = asyncio.Event()
        """Set when a call has returned, so that the index is read."""
        self._is_away = False

    def take(self, order: ModelOrder) -> None:
        """Queue an order. An unload cancels a load of the same claim that has not begun; the index then
        shows that the model is absent. A repeated order changes nothing. A check is dropped if another order
        for its claim is queued or under way."""
        if isinstance(order, CheckOrder):
            if _claim(order) not in self._under_way():
                self._waiting.append(order)
                self._woken.set()
            return
        same_model = [other for other in self._waiting if _claim(other) == _claim(order)]
        for other in same_model:
            self._waiting.remove(other)
        if any(isinstance(other, LoadOrder) for other in same_model) and isinstance(order, UnloadOrder):
            return
        if any(_claim(now) == _claim(order) and type(now) is type(order) for now in self.under_way):
            return
        if isinstance(order, UnloadOrder) and not any(isinstance(other, UnloadOrder) for other in same_model):
            self._leave(order)
        else:
            self._waiting.append(order)
        self._woken.set()

    def wake(self) -> None:
        self._woken.set()

    def _leave(self, order: UnloadOrder) -> None:
        """Queue an unload until no gateway uses the model or the grace period is over. A shorter grace period
        replaces a longer one."""
        until = asyncio.get_running_loop().time() + order.grace_seconds
        earlier = self._leaving.get(_claim(order))
        self._leaving[_claim(order)] = _Leaving(order, min(until, earlier.until) if earlier else until)
        self._left.set()

    async def keep(self, hear: Hear) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._carry_out(hear))
            group.create_task(self._look(hear))
            group.create_task(self._drain())

    async def _drain(self) -> None:
        """Queue the unloads of models that no gateway uses any more, until cancelled. This runs beside the
        other orders, because it may wait as long as a response of the model takes."""
        loop = asyncio.get_running_loop()
        while True:
            self._left.clear()
            for claim, leaving in list(self._leaving.items()):
                if loop.time() >= leaving.until or await self.have_let_go(mark_of(*claim, 0)):
                    del self._leaving[claim]
                    self._waiting.append(leaving.order)
                    self._woken.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.rules.drain_look_seconds if self._leaving else None):
                    await self._left.wait()

    async def _carry_out(self, hear: Hear) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                self._woken.clear()
                for order in self._that_may_begin():
                    self._waiting.remove(order)
                    self.under_way.append(order)
                    group.create_task(self._carry_out_one(order, hear))
                await self._woken.wait()

    def _that_may_begin(self) -> list[ModelOrder]:
        """Return the orders that may begin. Orders for the same model keep their sequence. A load that waits
        for a device does not block later loads on other devices."""
        begun: list[ModelOrder] = []
        earlier: list[ModelOrder] = []
        for order in self._waiting:
            ahead = [*self.under_way, *begun]
            loads = [
                earlier_order
                for earlier_order in ahead
                if earlier_order.server == order.server and not isinstance(earlier_order, UnloadOrder)
            ]
            is_blocked = (
                (len(loads) >= self._loads_at_once and not isinstance(order, UnloadOrder))
                or any(is_in_the_way(earlier_order, order) for earlier_order in ahead)
                or any(order.concerns(earlier_order) for earlier_order in earlier)
            )
            (earlier if is_blocked else begun).append(order)
        return begun

    async def _carry_out_one(self, order: ModelOrder, hear: Hear) -> None:
        try:
            await self._call(order, hear)
        finally:
            self.under_way.remove(order)
            self._done.set()
            self.on_end()

    async def _call(self, order: ModelOrder, hear: Hear) -> None:
        try:
            if isinstance(order, LoadOrder):
                await self._load(order)
            elif isinstance(order, CheckOrder):
                await self._check(order)
            elif self.may_send():
                await self.host.unload(order.model, self.rules.call_seconds)
        except HostRefused as refused:
            log.warning("a model server refused an order", server=self.host.name, model=order.model,
                        fault=f"{refused.fault}: {refused}")  # fmt: skip
            if isinstance(order, LoadOrder) and refused.fault is not HostFault.UNKNOWN:
                hear([self._load_failed(order, refused)])

    async def _check(self, order: CheckOrder) -> None:
        """Load the model again if its process is gone. Raises HostRefused."""
        host, rules = self.host, self.rules
        if await host.answers(order.model, rules.call_seconds) or not self.may_send():
            return
        log.warning("a model is READY but its process is gone; it is loaded again",
                    server=host.name, model=order.model)  # fmt: skip
        await host.unload(order.model, rules.call_seconds)
        loop = asyncio.get_running_loop()
        until = loop.time() + rules.gone_seconds
        while _stage_in(await host.index(rules.call_seconds), order.model) is not ModelState.ABSENT:
            if loop.time() >= until:
                break  # the model may stay UNLOADING, and can be loaded in that state
            await asyncio.sleep(rules.busy_look_seconds)
        await self._load(order)

    async def _load(self, order: LoadOrder | CheckOrder) -> None:
        if not order.model or await self._has(order.model):
            return  # if its files have changed, a load would reload the model, with both copies in memory
        if self.may_send():
            devices = sorted(device for device, _ in order.devices)
            await self.host.load(order.model, devices, self.rules.load_seconds)

    async def _has(self, model: str) -> bool:
        index = await self.host.index(self.rules.call_seconds)
        return _stage_in(index, model) is ModelState.READY

    def _load_failed(self, order: LoadOrder, refused: HostRefused) -> Report:
        if refused.fault is HostFault.UNREACHABLE:
            return _ended(order, self.clock, Ending.NEVER_STARTED, None)
        message = f"{_MESSAGES[refused.fault]}: {refused}"
        return _ended(order, self.clock, Ending.FAILED, Failure("load_failed", message))

    async def _look(self, hear: Hear) -> None:
        loop = asyncio.get_running_loop()
        known, changed_at = None, loop.time()
        while True:
            if self._done.is_set():
                changed_at = loop.time()  # Triton may answer a call before its index shows the result
            self._done.clear()
            claims = self._under_way()
            index = await self._read()
            if index is not None:
                claims |= self._under_way()  # orders since the call are not in the index yet
                now, host = self.clock.now(), self.host
                hear([ServerIndex(host.name, now, index.models, claims, host.address, index.incarnation)])
                if index.models != known:
                    known, changed_at = index.models, loop.time()
            is_busy = bool(claims) or (index is not None and _moves(index))
            pause = self._pause_seconds(loop.time() - changed_at, is_busy=is_busy)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._done.wait()

    def _pause_seconds(self, unchanged_seconds: float, *, is_busy: bool) -> float:
        """Return the pause before the next read of the index. A change is noticed with a delay of at most a
        tenth of the time that it took."""
        busy_seconds = self.rules.busy_look_seconds
        most_seconds = busy_seconds if is_busy else self.rules.look_seconds
        return min(most_seconds, max(unchanged_seconds, busy_seconds) / 10)

    async def _read(self) -> Index | None:
        """Return the index of the server; None if the server does not answer."""
        try:
            index = await self.host.index(self.rules.call_seconds)
        except HostRefused as refused:
            if not self._is_away:
                log.warning("the index of a model server cannot be read; trying again",
                            server=self.host.name, fault=str(refused))  # fmt: skip
            self._is_away = True
            return None
        self._is_away = False
        return index

    def _under_way(self) -> frozenset[Claim]:
        own_orders = (order for order in self.under_way if order.server == self.host.name)
        return frozenset((*map(_claim, self._waiting), *map(_claim, own_orders), *self._leaving))


def _claim(order: ModelOrder) -> Claim:
    return order.task, order.fence


def _stage_in(index: Index, model: str) -> ModelState:
    return index.models[model].stage if model in index.models else ModelState.ABSENT


def _moves(index: Index) -> bool:
    """Return True if a model is being loaded or unloaded."""
    stages = {model.stage for model in index.models.values()}
    return bool(stages & {ModelState.LOADING, ModelState.UNLOADING})


def _ended(order: LoadOrder, clock: Clock, ending: Ending, failure: Failure | None) -> Ended:
    return Ended(order.task, order.fence, clock.now(), ending, failure=failure)
