"""Sends queued inferences to model servers. Several inferences of one model travel in one request, and its
response is split among them.

A later leader may send the inferences again, so a response counts only under the fence of its claim.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import structlog

from gpubroker_server.core.domain.model_orders import DropOrder, InferOrder
from gpubroker_server.core.domain.orders import Ended, Ending, Failure, Report
from gpubroker_server.core.domain.units import Fence, TaskId
from gpubroker_server.core.serving.batching import (
    FORMAT,
    BatchRules,
    InferenceRequest,
    InferenceResponse,
    batches,
    joined,
    packed,
    request_in,
    split,
)
from gpubroker_server.core.serving.tensors import BadTensor
from gpubroker_server.ports.inferences import InferenceClient, InferenceFailed, InferenceFault, ReadObject
from gpubroker_server.ports.store import BlobMissing, BlobStore, Clock

log = structlog.get_logger("gpubroker.inference.queued")

Hear = Callable[[Sequence[Report]], None]
Claim = tuple[TaskId, Fence]

BATCHING_SECONDS = 60.0
"""The time for which the batch size of a model is cached. A model may be loaded again with another
configuration."""

MAX_QUEUES = 1024
"""Idle queues are removed once there are this many queues. The names of models come from clients, so their
number is not bounded otherwise."""

_PART_BYTES = 2 * 2**20
"""The most bytes of an object that are in memory at once."""

_OF_ONE = frozenset(
    {InferenceFault.REFUSED, InferenceFault.FAILED, InferenceFault.BROKEN, InferenceFault.DEAD}
)
"""The faults of a batch that a single request may have caused."""


@dataclass(slots=True)
class _QueuedInference:
    order: InferOrder
    request: InferenceRequest
    is_dropped: bool = False

    @property
    def claim(self) -> Claim:
        return self.order.task, self.order.fence


class InferenceDispatcher:
    """Sends queued inferences to model servers for one leader, during one term."""

    def __init__(
        self,
        clients: Iterable[InferenceClient],
        clock: Clock,
        usual: BatchRules | None = None,
        rules: Mapping[str, BatchRules] | None = None,
        blobs: BlobStore | None = None,
    ) -> None:
        """`rules` maps a model to its own rules; other models have those of `usual`. `blobs` holds the
        objects that requests name."""
        self._clients = {client.name: client for client in clients}
        self._clock = clock
        self._usual = usual or BatchRules()
        self._rules = rules or {}
        self._read: ReadObject | None = None if blobs is None else partial(object_parts, blobs)
        self._unheard: list[Report] = []
        self._hear: Hear = self._unheard.extend
        """Receives the reports. Until `run` is called, they are collected in a list."""
        self._queues: dict[tuple[str, str], _ModelQueue] = {}
        self._fresh: list[_ModelQueue] = []
        self._woken = asyncio.Event()
        self._known: dict[Claim, _QueuedInference] = {}

    async def run(self, hear: Hear) -> None:
        """Send queued inferences until cancelled. `hear` receives the reports."""
        self._hear = hear
        if self._unheard:
            hear(self._unheard)
        async with asyncio.TaskGroup() as group:
            while True:
                while self._fresh:
                    group.create_task(self._fresh.pop().keep())
                self._woken.clear()
                await self._woken.wait()

    def send(self, order: InferOrder, stored: bytes) -> None:
        """Queue a committed order."""
        client = self._clients.get(order.server)
        if client is None:
            self._end(order, Ending.NEVER_STARTED)
            return
        try:
            asked = _QueuedInference(order, request_in(stored))
        except BadTensor as fault:
            self._end(order, Ending.FAILED, Failure("corrupt_order", f"{fault}; submit it again"))
            return
        queue = self._queues.get((order.server, order.model))
        if queue is None:
            queue = self._open(client, order)
        self._known[asked.claim] = asked
        queue.take(asked)

    def _open(self, client: InferenceClient, order: InferOrder) -> "_ModelQueue":
        if len(self._queues) >= MAX_QUEUES:
            for home in [home for home, queue in self._queues.items() if queue.is_idle]:
                self._queues.pop(home).end()
        rules = self._rules.get(order.model, self._usual)
        queue = self._queues[order.server, order.model] = _ModelQueue(
            client, order.model, rules, self._report, self._read
        )
        self._fresh.append(queue)
        self._woken.set()
        return queue

    def drop(self, order: DropOrder) -> None:
        """Drop a queued inference, and ignore its response if one comes."""
        asked = self._known.pop((order.task, order.fence), None)
        if asked is not None:
            asked.is_dropped = True
        self._hear([Ended(order.task, order.fence, self._clock.now(), Ending.STOPPED)])

    def _report(
        self, batch: Sequence[_QueuedInference], outcome: "Sequence[InferenceResponse] | InferenceFailed"
    ) -> None:
        now = self._clock.now()
        reports: list[Report] = []
        for index, asked in enumerate(batch):
            if self._known.pop(asked.claim, None) is None:
                continue
            if isinstance(outcome, InferenceFailed):
                ending, failure = _ending(outcome)
                reports.append(Ended(*asked.claim, now, ending, failure=failure))
            else:
                result = packed(outcome[index])
                reports.append(Ended(*asked.claim, now, Ending.SUCCEEDED, result, FORMAT))
        if reports:
            self._hear(reports)

    def _end(self, order: InferOrder, ending: Ending, failure: Failure | None = None) -> None:
        self._hear([Ended(order.task, order.fence, self._clock.now(), ending, failure=failure)])


@dataclass(eq=False)
class _ModelQueue:
    """The queue of one model of one server."""

    client: InferenceClient
    model: str
    rules: BatchRules
    report: Callable[[Sequence[_QueuedInference], Sequence[InferenceResponse] | InferenceFailed], None]
    read: ReadObject | None

    def __post_init__(self) -> None:
        self._waiting: list[_QueuedInference] = []
        self._woken = asyncio.Event()
        self._is_full = asyncio.Event()
        self._most_rows = 1
        self._asked_at: float | None = None
        """The time when `_most_rows` was last read from the server; None before that."""
        self._answers_by_rows = True
        self._under_way = 0
        self._is_over = False

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._under_way

    def end(self) -> None:
        """End `keep`. Call this only while the queue is idle."""
        self._is_over = True
        self._woken.set()

    def take(self, asked: _QueuedInference) -> None:
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
                most_rows = await self._batch_size()
                if self._rows() < most_rows:
                    self._is_full.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self.rules.delay_seconds):
                            await self._is_full.wait()
                waiting = [waiter for waiter in self._waiting if not waiter.is_dropped]
                self._waiting = []
                self._woken.clear()
                for batch in batches([waiter.request for waiter in waiting], most_rows):
                    self._under_way += 1
                    group.create_task(self._send_batch([waiting[index] for index in batch]))

    def _rows(self) -> int:
        return sum(max(1, waiter.request.rows) for waiter in self._waiting)

    async def _batch_size(self) -> int:
        """Return the most rows of a batch. If the server does not answer, it is 1, and the next batch asks
        again."""
        now = asyncio.get_running_loop().time()
        if self.rules.most_rows < 2 or not self._answers_by_rows:
            return 1
        if self._asked_at is None or now - self._asked_at >= BATCHING_SECONDS:
            self._most_rows = 1
            with suppress(InferenceFailed):
                batching = await self.client.batching(self.model, "")
                self._most_rows = min(batching.most_rows, self.rules.most_rows)
                self._asked_at = now
        return self._most_rows

    async def _send_batch(self, batch: Sequence[_QueuedInference]) -> None:
        try:
            await self._ask(batch)
        finally:
            self._under_way -= 1

    async def _ask(self, batch: Sequence[_QueuedInference]) -> None:
        """Send the batch in one request. If that fails with a fault that a single inference may have caused,
        send the inferences one by one."""
        try:
            self.report(batch, await self._answers([waiter.request for waiter in batch]))
        except InferenceFailed as refused:
            if len(batch) == 1 or refused.fault not in _OF_ONE:
                self.report(batch, refused)
                return
            log.info("a batch is sent again one by one", model=self.model, fault=str(refused))
            for waiter in batch:
                if not waiter.is_dropped:
                    await self._ask([waiter])

    async def _answers(self, requests: Sequence[InferenceRequest]) -> Sequence[InferenceResponse]:
        try:
            answer = await self.client.infer(self.model, joined(requests), self.read)
        except InferenceFailed:
            raise
        except Exception as mistake:  # otherwise it would end every leader that sends this inference
            log.error("an inference failed", model=self.model, exc_info=mistake)
            raise InferenceFailed(InferenceFault.FAILED, f"the service failed: {mistake!r}") from mistake
        if len(requests) == 1:
            return [answer]
        try:
            return split(answer, requests)
        except BadTensor as fault:
            self._answers_by_rows = False
            log.warning("a model does not answer by rows, and gets no batches any more", model=self.model,
                        fault=str(fault))  # fmt: skip
            raise InferenceFailed(InferenceFault.FAILED, str(fault)) from None


async def object_parts(blobs: BlobStore, digest: str, size_bytes: int) -> AsyncIterator[bytes]:
    """Yield the bytes of an object in parts. The last part is yielded only if the digest of all bytes is
    right. Raises InferenceFailed if the bytes are missing or damaged."""
    seen, at = hashlib.sha256(), 0
    while at < size_bytes:
        try:
            part = await blobs.read(digest, at, min(_PART_BYTES, size_bytes - at))
        except BlobMissing:
            part = b""
        at += len(part)
        await asyncio.to_thread(seen.update, part)
        if not part or (at == size_bytes and seen.hexdigest() != digest):
            detail = f"the bytes of object {digest} are gone or damaged; upload them and submit it again"
            raise InferenceFailed(InferenceFault.REFUSED, detail)
        yield part


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
