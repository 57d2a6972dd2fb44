"""Inferences on their way to servers of models: alike ones joined into one request, and each told its part.

What is sent may be sent again by a later leader: an answer counts only under the fence of its claim.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog

from gpubroker_server.core.domain.model_orders import DropOrder, InferOrder
from gpubroker_server.core.domain.orders import Ended, Ending, Failure, Report
from gpubroker_server.core.domain.units import Fence, Seconds, TaskId
from gpubroker_server.core.serving.batching import (
    FORMAT,
    InferenceRequest,
    InferenceResponse,
    batches,
    joined,
    packed,
    request_in,
    split,
)
from gpubroker_server.core.serving.tensors import BadTensor
from gpubroker_server.ports.inferences import InferenceClient, InferenceFailed, InferenceFault
from gpubroker_server.ports.store import Clock

log = structlog.get_logger("gpubroker.inference.queued")

Hear = Callable[[Sequence[Report]], None]
Claim = tuple[TaskId, Fence]

LOOK_AGAIN_SECONDS = 60.0
"""So long it is believed how many rows a model takes: it may be loaded anew with another configuration."""

MOST_LANES = 1024
"""Of models that nobody asks at the moment so many are remembered: names come from clients."""

_OF_ONE = frozenset(
    {InferenceFault.REFUSED, InferenceFault.FAILED, InferenceFault.BROKEN, InferenceFault.DEAD}
)
"""What one request of a batch may have brought upon all."""


@dataclass(frozen=True, slots=True)
class BatchRules:
    most_rows: int = 16
    """So many rows are sent together at most, and no more than the model takes; 1: each request alone."""
    delay_seconds: Seconds = Seconds(0.005)
    """So long the first of a batch waits for others."""


@dataclass(slots=True)
class _Asked:
    order: InferOrder
    request: InferenceRequest
    is_dropped: bool = False

    @property
    def claim(self) -> Claim:
        return self.order.task, self.order.fence


class InferenceDesk:
    """Of one leader, for one term."""

    def __init__(
        self,
        clients: Iterable[InferenceClient],
        clock: Clock,
        usual: BatchRules | None = None,
        rules: Mapping[str, BatchRules] | None = None,
    ) -> None:
        """`rules`: of models that differ from what is `usual`."""
        self._clients = {client.name: client for client in clients}
        self._clock = clock
        self._usual = usual or BatchRules()
        self._rules = rules or {}
        self._untold: list[Report] = []
        self._hear: Hear = self._untold.extend
        """Until somebody hears it is kept."""
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._fresh: list[_Lane] = []
        self._woken = asyncio.Event()
        self._known: dict[Claim, _Asked] = {}

    async def run(self, hear: Hear) -> None:
        """Until cancelled. `hear` takes what there is to tell."""
        self._hear = hear
        if self._untold:
            hear(self._untold)
        async with asyncio.TaskGroup() as group:
            while True:
                while self._fresh:
                    group.create_task(self._fresh.pop().keep())
                self._woken.clear()
                await self._woken.wait()

    def send(self, order: InferOrder, stored: bytes) -> None:
        """Take a committed order; it is not waited for."""
        client = self._clients.get(order.server)
        if client is None:
            self._end(order, Ending.NEVER_STARTED)
            return
        try:
            asked = _Asked(order, request_in(stored))
        except BadTensor as fault:
            self._end(order, Ending.FAILED, Failure("corrupt_order", f"{fault}; submit it again"))
            return
        lane = self._lanes.get((order.server, order.model))
        if lane is None:
            lane = self._open(client, order)
        self._known[asked.claim] = asked
        lane.take(asked)

    def _open(self, client: InferenceClient, order: InferOrder) -> "_Lane":
        if len(self._lanes) >= MOST_LANES:
            for home in [home for home, lane in self._lanes.items() if lane.is_idle]:
                self._lanes.pop(home).end()
        rules = self._rules.get(order.model, self._usual)
        lane = self._lanes[order.server, order.model] = _Lane(client, order.model, rules, self._told)
        self._fresh.append(lane)
        self._woken.set()
        return lane

    def drop(self, order: DropOrder) -> None:
        """Its answer is not told any more, if one comes."""
        asked = self._known.pop((order.task, order.fence), None)
        if asked is not None:
            asked.is_dropped = True
        self._hear([Ended(order.task, order.fence, self._clock.now(), Ending.STOPPED)])

    def _told(self, batch: Sequence[_Asked], said: "Sequence[InferenceResponse] | InferenceFailed") -> None:
        now = self._clock.now()
        reports: list[Report] = []
        for at, asked in enumerate(batch):
            if self._known.pop(asked.claim, None) is None:
                continue
            if isinstance(said, InferenceFailed):
                ending, failure = _ending(said)
                reports.append(Ended(*asked.claim, now, ending, failure=failure))
            else:
                result = packed(said[at])
                reports.append(Ended(*asked.claim, now, Ending.SUCCEEDED, result, FORMAT))
        if reports:
            self._hear(reports)

    def _end(self, order: InferOrder, ending: Ending, failure: Failure | None = None) -> None:
        self._hear([Ended(order.task, order.fence, self._clock.now(), ending, failure=failure)])


class _Lane:
    """One model of one server."""

    def __init__(
        self,
        client: InferenceClient,
        model: str,
        rules: BatchRules,
        told: "Callable[[Sequence[_Asked], Sequence[InferenceResponse] | InferenceFailed], None]",
    ) -> None:
        self._client = client
        self._model = model
        self._rules = rules
        self._told = told
        self._waiting: list[_Asked] = []
        self._woken = asyncio.Event()
        self._is_full = asyncio.Event()
        self._most_rows = 1
        self._asked_at: float | None = None
        """When it was last asked how many rows it takes."""
        self._answers_by_rows = True
        self._under_way = 0
        self._is_over = False

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._under_way

    def end(self) -> None:
        """Nothing comes any more, and nothing is under way."""
        self._is_over = True
        self._woken.set()

    def take(self, asked: _Asked) -> None:
        self._waiting.append(asked)
        self._woken.set()
        if self._rows() >= self._most_rows:
            self._is_full.set()

    async def keep(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                await self._woken.wait()
                if self._is_over:
                    return
                most_rows = await self._take_at_once()
                if self._rows() < most_rows:
                    self._is_full.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._rules.delay_seconds):
                            await self._is_full.wait()
                waiting = [one for one in self._waiting if not one.is_dropped]
                self._waiting = []
                self._woken.clear()
                for batch in batches([one.request for one in waiting], most_rows):
                    self._under_way += 1
                    group.create_task(self._see_to([waiting[at] for at in batch]))

    def _rows(self) -> int:
        return sum(max(1, one.request.rows) for one in self._waiting)

    async def _take_at_once(self) -> int:
        """How many rows; what the model does not say now it is asked the next time."""
        now = asyncio.get_running_loop().time()
        if self._rules.most_rows < 2 or not self._answers_by_rows:
            return 1
        if self._asked_at is None or now - self._asked_at >= LOOK_AGAIN_SECONDS:
            self._most_rows = 1
            with suppress(InferenceFailed):
                batching = await self._client.batching(self._model, "")
                self._most_rows = min(batching.most_rows, self._rules.most_rows)
                self._asked_at = now
        return self._most_rows

    async def _see_to(self, batch: Sequence[_Asked]) -> None:
        try:
            await self._ask(batch)
        finally:
            self._under_way -= 1

    async def _ask(self, batch: Sequence[_Asked]) -> None:
        """Together; each alone if one of them may have failed the others."""
        try:
            self._told(batch, await self._answers([one.request for one in batch]))
        except InferenceFailed as refused:
            if len(batch) == 1 or refused.fault not in _OF_ONE:
                self._told(batch, refused)
                return
            log.info("a batch is asked one by one", model=self._model, fault=str(refused))
            for one in batch:
                if not one.is_dropped:
                    await self._ask([one])

    async def _answers(self, requests: Sequence[InferenceRequest]) -> Sequence[InferenceResponse]:
        try:
            answer = await self._client.infer(self._model, joined(requests))
        except InferenceFailed:
            raise
        except Exception as mistake:  # of ours: it would bring down each leader that asks
            log.error("an inference failed", model=self._model, exc_info=mistake)
            raise InferenceFailed(
                InferenceFault.FAILED, f"the service failed at it: {mistake!r}"
            ) from mistake
        if len(requests) == 1:
            return [answer]
        try:
            return split(answer, requests)
        except BadTensor as fault:
            self._answers_by_rows = False
            log.warning("a model does not answer by rows, and is asked no batches", model=self._model,
                        fault=str(fault))  # fmt: skip
            raise InferenceFailed(InferenceFault.FAILED, str(fault)) from None


def _ending(refused: InferenceFailed) -> tuple[Ending, Failure | None]:
    message = str(refused)
    match refused.fault:
        case InferenceFault.UNREACHABLE | InferenceFault.NOT_THERE:
            log.info("an inference is sent again later", fault=message)
            return Ending.NEVER_STARTED, None
        case InferenceFault.REFUSED:
            return Ending.FAILED, Failure("inference_refused", message)
        case InferenceFault.FAILED:
            return Ending.FAILED, Failure("inference_failed", message)
        case InferenceFault.DEAD:
            return Ending.LOST, Failure("model_process_gone", message)
        case InferenceFault.BROKEN:
            return Ending.LOST, Failure("model_server_lost", f"the server broke off: {message}")
