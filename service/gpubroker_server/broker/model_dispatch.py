"""Orders to servers of models on their way, one after the other, and what the servers' indexes say.

Servers cannot be fenced: they do what they are told, by whomever and however late. So nothing is sent once
the tenure is over, a new leader waits until what an older one sent has arrived, and what a server has is only
ever taken from its index.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from gpubroker_server.core.domain.leader_term import Tenure
from gpubroker_server.core.domain.model_orders import (
    CheckOrder,
    LoadOrder,
    ModelOrder,
    ServerSeen,
    Stage,
    UnloadOrder,
)
from gpubroker_server.core.domain.orders import Ended, Ending, Failure, Report
from gpubroker_server.core.domain.units import DeviceKey, Fence, Seconds, TaskId
from gpubroker_server.ports.last_values import claim_name
from gpubroker_server.ports.models import HostFault, HostRefused, Index, ModelHost
from gpubroker_server.ports.store import Clock, ReadTicks

log = structlog.get_logger("gpubroker.tasks.task")

Hear = Callable[[Sequence[Report]], None]
Claim = tuple[TaskId, Fence]
HaveLetGo = Callable[[str], Awaitable[bool]]
"""Whether all gateways have let go of a claim, as `claim_name` names it."""

_MESSAGES = {
    HostFault.NOT_FOUND: "the server has no such model",
    HostFault.OUT_OF_MEMORY: "the server could not get the memory for it",
    HostFault.FAILED: "the server failed to load it",
    HostFault.NOT_ALLOWED: "the server loads nothing on request; start it with --model-control-mode=explicit",
}


@dataclass(frozen=True, slots=True)
class DeskRules:
    look_seconds: Seconds = Seconds(2.0)
    """So often each index is read."""
    busy_look_seconds: Seconds = Seconds(0.25)
    """And so often while something is on its way there."""
    call_seconds: Seconds = Seconds(10.0)
    """What is no load is answered by then, or has not been heard."""
    load_seconds: Seconds = Seconds(600.0)
    """With an answer that takes longer, the index says what became of a load."""
    gone_seconds: Seconds = Seconds(3.0)
    """So long a model whose process is gone has to leave, before it is loaded anew all the same."""
    drain_look_seconds: Seconds = Seconds(0.05)
    """Before an unload the gateways are asked so often whether they have let go of the model. After the time
    that it has to leave it is unloaded all the same: what the server has by then it answers."""


async def _nobody_asks(_claim: str) -> bool:
    return True


class ModelDesk:
    """Of one leader, for one term."""

    def __init__(
        self,
        hosts: Iterable[ModelHost],
        clock: Clock,
        ticks: ReadTicks,
        rules: DeskRules | None = None,
        wait_seconds: Seconds = Seconds(0.0),
        have_let_go: HaveLetGo = _nobody_asks,
    ) -> None:
        """`wait_seconds`: so long what an older leader has sent may be on its way."""
        self._clock = clock
        self._ticks = ticks
        self._wait_seconds = wait_seconds
        self._untold: list[Report] = []
        self._hear: Hear = self._untold.extend
        locks: dict[DeviceKey, asyncio.Lock] = {}
        self._lanes = {
            host.name: _Lane(host, clock, rules or DeskRules(), locks, self._may_send, have_let_go)
            for host in hosts
        }
        self._tenure: Tenure | None = None

    async def run(self, tenure: Tenure, hear: Hear) -> None:
        """Until cancelled. `hear` takes what there is to tell."""
        self._tenure, self._hear = tenure, hear
        if self._untold:
            hear(self._untold)
        await asyncio.sleep(self._wait_seconds if self._lanes else 0.0)
        async with asyncio.TaskGroup() as group:
            for lane in self._lanes.values():
                group.create_task(lane.keep(hear))

    def send(self, order: ModelOrder) -> None:
        """Take a committed order; it is not waited for."""
        lane = self._lanes.get(order.server)
        if lane is not None:
            lane.take(order)
        elif isinstance(order, LoadOrder):
            message = f"there is no server {order.server} (any more); configure it under triton.servers"
            failure = Failure("load_failed", message)
            self._hear([_ended(order, self._clock, Ending.FAILED, failure)])

    def _may_send(self) -> bool:
        return self._tenure is not None and not self._tenure.is_over(self._ticks())


class _Leaving(NamedTuple):
    order: UnloadOrder
    until: float
    """Of the loop's clock: then it is unloaded whoever has not let go of it."""


class _Lane:
    """One server: one call at a time that changes something, and its index beside it."""

    def __init__(
        self,
        host: ModelHost,
        clock: Clock,
        rules: DeskRules,
        locks: dict[DeviceKey, asyncio.Lock],
        may_send: Callable[[], bool],
        have_let_go: HaveLetGo,
    ) -> None:
        self._host = host
        self._clock = clock
        self._rules = rules
        self._locks = locks
        self._may_send = may_send
        self._have_let_go = have_let_go
        self._leaving: dict[Claim, _Leaving] = {}
        """To be unloaded, when the gateways have let go of it."""
        self._left = asyncio.Event()
        self._waiting: deque[ModelOrder] = deque()
        self._now: ModelOrder | None = None
        """What is being carried out."""
        self._woken = asyncio.Event()
        self._done = asyncio.Event()
        """A call has come back: its index is worth a look."""
        self._is_away = False

    def take(self, order: ModelOrder) -> None:
        """A load that has not begun is taken back by the unload: the index says that nothing is there. The
        same order once more changes nothing. Nothing is checked of which more is known soon."""
        if isinstance(order, CheckOrder):
            if _claim(order) not in self._under_way():
                self._waiting.append(order)
                self._woken.set()
            return
        mine = [other for other in self._waiting if _claim(other) == _claim(order)]
        for other in mine:
            self._waiting.remove(other)
        if any(isinstance(other, LoadOrder) for other in mine) and isinstance(order, UnloadOrder):
            return
        if self._now is not None and _claim(self._now) == _claim(order) and type(self._now) is type(order):
            return
        if isinstance(order, UnloadOrder) and not any(isinstance(other, UnloadOrder) for other in mine):
            self._leave(order)
        else:
            self._waiting.append(order)
        self._woken.set()

    def _leave(self, order: UnloadOrder) -> None:
        """A shorter time takes the place of a longer one."""
        until = asyncio.get_running_loop().time() + order.grace_seconds
        known = self._leaving.get(_claim(order))
        self._leaving[_claim(order)] = _Leaving(order, min(until, known.until) if known else until)
        self._left.set()

    async def keep(self, hear: Hear) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._carry_out(hear))
            group.create_task(self._look(hear))
            group.create_task(self._drain())

    async def _drain(self) -> None:
        """Beside what is carried out: it may take as long as an answer of the model."""
        loop = asyncio.get_running_loop()
        while True:
            self._left.clear()
            for claim, leaving in list(self._leaving.items()):
                if loop.time() >= leaving.until or await self._have_let_go(claim_name(*claim)):
                    del self._leaving[claim]
                    self._waiting.append(leaving.order)
                    self._woken.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._rules.drain_look_seconds if self._leaving else None):
                    await self._left.wait()

    async def _carry_out(self, hear: Hear) -> None:
        while True:
            while self._waiting:
                self._now = self._waiting.popleft()
                try:
                    await self._call(self._now, hear)
                finally:
                    self._now = None
                    self._done.set()
            self._woken.clear()
            await self._woken.wait()

    async def _call(self, order: ModelOrder, hear: Hear) -> None:
        try:
            if isinstance(order, LoadOrder):
                await self._load(order)
            elif isinstance(order, CheckOrder):
                await self._check(order)
            elif self._may_send():
                await self._host.unload(order.model, self._rules.call_seconds)
        except HostRefused as refused:
            log.warning("a model server did not do it", server=self._host.name, model=order.model,
                        fault=f"{refused.fault}: {refused}")  # fmt: skip
            if isinstance(order, LoadOrder) and refused.fault is not HostFault.UNKNOWN:
                hear([self._told(order, refused)])

    async def _check(self, order: CheckOrder) -> None:
        """Raises HostRefused: what is there then, the index says."""
        host, rules = self._host, self._rules
        if await host.answers(order.model, rules.call_seconds) or not self._may_send():
            return
        log.warning("a model is ready and answers nothing, its process is gone: it is loaded anew",
                    server=host.name, model=order.model)  # fmt: skip
        await host.unload(order.model, rules.call_seconds)
        loop = asyncio.get_running_loop()
        until = loop.time() + rules.gone_seconds
        while _stage_in(await host.index(rules.call_seconds), order.model) is not Stage.ABSENT:
            if loop.time() >= until:
                break  # one that was asked when its process had gone may be UNLOADING for ever, and loads
            await asyncio.sleep(rules.busy_look_seconds)
        await self._load(LoadOrder(order.task, order.fence, order.server, order.model, order.devices))

    async def _load(self, order: LoadOrder) -> None:
        """Devices are locked in the order of their keys, so that nobody waits for whom waits for him."""
        devices = sorted(device for device, _ in order.devices)
        async with AsyncExitStack() as held:
            for device in devices:
                await held.enter_async_context(self._locks.setdefault(device, asyncio.Lock()))
            if not order.model or await self._has(order.model):
                return  # of changed files a load would be a reload, with both copies in memory meanwhile
            if self._may_send():
                await self._host.load(order.model, devices, self._rules.load_seconds)

    async def _has(self, model: str) -> bool:
        index = await self._host.index(self._rules.call_seconds)
        return _stage_in(index, model) is Stage.READY

    def _told(self, order: LoadOrder, refused: HostRefused) -> Report:
        if refused.fault is HostFault.UNREACHABLE:
            return _ended(order, self._clock, Ending.NEVER_STARTED, None)
        message = f"{_MESSAGES[refused.fault]}: {refused}"
        return _ended(order, self._clock, Ending.FAILED, Failure("load_failed", message))

    async def _look(self, hear: Hear) -> None:
        while True:
            self._done.clear()
            claims = self._under_way()
            index = await self._read()
            if index is not None:
                claims |= self._under_way()  # of what was ordered meanwhile it need not tell yet
                hear([ServerSeen(self._host.name, self._clock.now(), index.models, claims)])
            is_busy = bool(claims) or (index is not None and _moves(index))
            pause = self._rules.busy_look_seconds if is_busy else self._rules.look_seconds
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._done.wait()

    async def _read(self) -> Index | None:
        """None if the server does not tell."""
        try:
            index = await self._host.index(self._rules.call_seconds)
        except HostRefused as refused:
            if not self._is_away:
                log.warning("the index of a model server is not read; trying again",
                            server=self._host.name, fault=str(refused))  # fmt: skip
            self._is_away = True
            return None
        self._is_away = False
        return index

    def _under_way(self) -> frozenset[Claim]:
        orders = [*self._waiting] if self._now is None else [*self._waiting, self._now]
        return frozenset((*map(_claim, orders), *self._leaving))


def _claim(order: ModelOrder) -> Claim:
    return order.task, order.fence


def _stage_in(index: Index, model: str) -> Stage:
    return index.models[model].stage if model in index.models else Stage.ABSENT


def _moves(index: Index) -> bool:
    """A model is about to come or to go."""
    stages = {model.stage for model in index.models.values()}
    return bool(stages & {Stage.LOADING, Stage.UNLOADING})


def _ended(order: LoadOrder, clock: Clock, ending: Ending, failure: Failure | None) -> Ended:
    return Ended(order.task, order.fence, clock.now(), ending, failure=failure)
