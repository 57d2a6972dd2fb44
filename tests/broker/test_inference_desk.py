"""Inferences sent to a server: joined, cut, asked one by one, dropped; and a leader with such a desk."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gpubroker_server.broker.inference_dispatch import MAX_QUEUES, InferenceDispatcher
from gpubroker_server.core.domain.decisions import Request
from gpubroker_server.core.domain.model_orders import DropOrder, InferOrder
from gpubroker_server.core.domain.orders import Ended, Ending, Report
from gpubroker_server.core.domain.policy import InferenceServers
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Fence, Seconds, TaskId
from gpubroker_server.core.serving.batching import (
    BatchRules,
    InferenceRequest,
    InferenceResponse,
    packed,
    response_in,
)
from gpubroker_server.core.serving.tensors import Tensor, tensor_of
from gpubroker_server.ports.inferences import (
    Batching,
    InferenceClient,
    InferenceFailed,
    InferenceFault,
    ReadObject,
)
from msgspec.structs import replace

from tests.broker.stage import Hands, Stage, a_stage
from tests.builders import NOW
from tests.gateway.harness import until
from tests.patience import PATIENCE_SECONDS
from tests.tensor_values import values_of

LONG = Seconds(3600.0)
TOGETHER = BatchRules(delay_seconds=Seconds(0.05))


@dataclass
class Doubling(InferenceClient):
    """A server of models whose one model doubles what it is given, and takes no negative numbers."""

    name: str = "lab"
    most_rows: int = 8
    by_rows: bool = True
    faults: list[InferenceFault] = field(default_factory=list)
    """What the next requests meet, one after the other."""
    asked: list[list[float]] = field(default_factory=list)
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.goes_on.set()

    async def infer(
        self, model: str, request: InferenceRequest, read: ReadObject | None = None
    ) -> InferenceResponse:
        values = values_of(request.inputs[0])
        self.asked.append(values)
        await self.goes_on.wait()
        if self.faults:
            raise InferenceFailed(self.faults.pop(0), "as the test wants it")
        if min(values) < 0:
            raise InferenceFailed(InferenceFault.FAILED, "takes no negative numbers")
        answer = rows(*(2 * value for value in values))
        if not self.by_rows:
            answer = replace(answer, shape=(1, len(values)))
        return InferenceResponse(model, "1", (answer,), id=request.id)

    async def batching(self, model: str, version: str) -> Batching:  # of the port
        return Batching(self.most_rows)

    async def close(self) -> None:
        pass


def rows(*values: float) -> Tensor:
    return tensor_of("x", "FP32", [len(values), 1], list(values))


class Room:
    """A desk at work, and what it has told."""

    def __init__(self, client: InferenceClient, rules: BatchRules) -> None:
        self.clock = Hands()
        self.told: list[Report] = []
        self.desk = InferenceDispatcher([client], self.clock, rules)

    def send(
        self, id: str, *values: float, server: str = "lab", model: str = "m", stored: bytes | None = None
    ) -> None:
        order = InferOrder(TaskId(id), Fence(1), server, model)
        self.desk.send(order, packed(InferenceRequest((rows(*values),), id=id)) if stored is None else stored)

    async def ended(self, count: int) -> dict[str, Ended]:
        await until(lambda: len(self.told) >= count)
        assert len(self.told) == count
        return {report.task: report for report in self.told if isinstance(report, Ended)}


@asynccontextmanager
async def a_room(client: InferenceClient, rules: BatchRules = TOGETHER) -> AsyncIterator[Room]:
    room = Room(client, rules)
    work = asyncio.create_task(room.desk.run(room.told.extend))
    try:
        yield room
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def answers(reports: dict[str, Ended]) -> dict[str, list[float]]:
    found = {}
    for name, report in reports.items():
        assert report.ending is Ending.SUCCEEDED, report
        assert report.result is not None
        answer = response_in(report.result)
        assert answer.id == name
        found[name] = values_of(answer.outputs[0])
    return found


async def test_alike_inferences_share_a_request_and_each_gets_its_own_rows() -> None:
    client = Doubling()
    async with a_room(client) as room:
        room.send("a", 1)
        room.send("b", 2, 3)
        assert answers(await room.ended(2)) == {"a": [2], "b": [4, 6]}
    assert client.asked == [[1, 2, 3]]


async def test_a_full_batch_does_not_wait() -> None:
    client = Doubling(most_rows=2)
    async with a_room(client, BatchRules(delay_seconds=LONG)) as room:
        room.send("a", 1)
        await until(
            lambda: bool(room.desk._queues) and next(iter(room.desk._queues.values()))._most_rows == 2
        )
        room.send("b", 2)
        assert answers(await room.ended(2)) == {"a": [2], "b": [4]}
    assert client.asked == [[1, 2]]


async def test_a_model_that_takes_no_batches_is_asked_one_by_one() -> None:
    client = Doubling(most_rows=1)
    async with a_room(client, BatchRules(delay_seconds=LONG)) as room:
        room.send("a", 1)
        room.send("b", 2)
        await room.ended(2)
    assert sorted(client.asked) == [[1], [2]]


async def test_and_so_is_one_that_the_operator_wants_asked_so() -> None:
    client = Doubling()
    async with a_room(client, BatchRules(most_rows=1, delay_seconds=LONG)) as room:
        room.send("a", 1)
        await room.ended(1)
        room.send("b", 2)
        await room.ended(2)
    assert client.asked == [[1], [2]]


async def test_one_that_the_model_fails_at_harms_no_other_of_its_batch() -> None:
    client = Doubling()
    async with a_room(client) as room:
        room.send("a", 1)
        room.send("bad", -1)
        room.send("b", 2)
        told = await room.ended(3)
    bad = told.pop("bad")
    assert (bad.ending, bad.failure and bad.failure.kind) == (Ending.FAILED, "inference_failed")
    assert answers(told) == {"a": [2], "b": [4]}
    assert client.asked == [[1, -1, 2], [1], [-1], [2]]


async def test_a_server_that_takes_nothing_now_is_not_asked_for_each_of_a_batch() -> None:
    client = Doubling(faults=[InferenceFault.UNREACHABLE])
    async with a_room(client) as room:
        room.send("a", 1)
        room.send("b", 2)
        told = await room.ended(2)
    assert {report.ending for report in told.values()} == {Ending.NEVER_STARTED}
    assert client.asked == [[1, 2]]


async def test_each_fault_is_reported_as_its_ending() -> None:
    expected = {
        InferenceFault.NOT_THERE: (Ending.NEVER_STARTED, None),
        InferenceFault.REFUSED: (Ending.FAILED, "inference_refused"),
        InferenceFault.FAILED: (Ending.FAILED, "inference_failed"),
        InferenceFault.DEAD: (Ending.LOST, "model_process_gone"),
        InferenceFault.BROKEN: (Ending.LOST, "model_server_lost"),
    }
    for fault, (ending, kind) in expected.items():
        async with a_room(Doubling(faults=[fault])) as room:
            room.send("a", 1)
            report = (await room.ended(1))["a"]
            assert (report.ending, report.failure and report.failure.kind) == (ending, kind)


async def test_a_mistake_of_ours_fails_one_inference_and_not_the_leader() -> None:
    """Each later leader would send it again, and end of it as well."""
    client = Doubling()
    async with a_room(client) as room:
        room.send("a", 1)
        room.desk._clients["lab"].infer = None  # type: ignore[method-assign,assignment]  # whatever it is
        ended = await room.ended(1)
        assert ended["a"].failure is not None
        assert (ended["a"].ending, ended["a"].failure.kind) == (Ending.FAILED, "inference_failed")
        del client.infer
        room.send("b", 2)
        assert "b" in await room.ended(2)


async def test_a_model_that_does_not_answer_by_rows_is_asked_no_batches_any_more() -> None:
    client = Doubling(by_rows=False)
    async with a_room(client) as room:
        room.send("a", 1)
        room.send("b", 2)
        assert answers(await room.ended(2)) == {"a": [2], "b": [4]}
        room.send("c", 3)
        room.send("d", 4)
        await room.ended(4)
    assert client.asked == [[1, 2], [1], [2], [3], [4]]


async def test_a_dropped_inference_ends_at_once_and_its_response_is_ignored() -> None:
    client = Doubling(most_rows=1)
    async with a_room(client) as room:
        client.goes_on.clear()
        room.send("a", 1)
        await until(lambda: bool(client.asked))
        room.desk.drop(DropOrder(TaskId("a"), Fence(1)))
        assert (await room.ended(1))["a"].ending is Ending.STOPPED
        client.goes_on.set()
        room.send("b", 2)
        told = await room.ended(2)
        assert told["b"].ending is Ending.SUCCEEDED


async def test_idle_queues_are_removed_beyond_a_limit() -> None:
    """Names come from clients, and a server that is not in the ledger is asked for whatever they name."""
    client = Doubling()
    async with a_room(client, BatchRules(delay_seconds=Seconds(0.001))) as room:
        before = len(asyncio.all_tasks())
        for at in range(MAX_QUEUES):
            room.send(f"t{at}", 1, model=f"m{at}")
        await room.ended(MAX_QUEUES)
        client.goes_on.clear()
        room.send("a", 1, model="more")
        await until(lambda: len(asyncio.all_tasks()) == before + 2)  # its lane, and its request
        client.goes_on.set()
        assert "a" in await room.ended(MAX_QUEUES + 1)
        room.send("b", 1, model="m0")
        assert "b" in await room.ended(MAX_QUEUES + 2)


async def test_an_unknown_inference_can_be_dropped() -> None:
    async with a_room(Doubling()) as room:
        room.desk.drop(DropOrder(TaskId("a"), Fence(1)))
        assert (await room.ended(1))["a"].ending is Ending.STOPPED


async def test_one_that_is_dropped_while_it_waits_for_others_is_not_sent() -> None:
    client = Doubling()
    async with a_room(client) as room:
        room.send("a", 1)
        room.send("b", 2)
        room.desk.drop(DropOrder(TaskId("a"), Fence(1)))
        await room.ended(2)
    assert client.asked == [[2]]


async def test_an_inference_that_cannot_be_sent_is_reported_at_once() -> None:
    async with a_room(Doubling()) as room:
        room.send("a", 1, server="gone")
        room.send("b", stored=b"\xff")
        told = await room.ended(2)
    assert told["a"].ending is Ending.NEVER_STARTED
    assert (told["b"].ending, told["b"].failure and told["b"].failure.kind) == (
        Ending.FAILED,
        "corrupt_order",
    )


@asynccontextmanager
async def a_leader(
    folder: Path, *clients: InferenceClient
) -> AsyncIterator[tuple[Stage, Callable[[], None]]]:
    """And what has another one take over, with the second client; the first stays at work."""
    async with a_stage(folder, serving=InferenceServers(others=("lab",))) as stage:
        desks = [InferenceDispatcher([client], stage.clock, BatchRules(most_rows=1)) for client in clients]
        works = [asyncio.create_task(desk.run(lambda reports: stage.leader.hear(reports))) for desk in desks]
        stage.use_inferences(desks[0])
        try:
            yield stage, lambda: stage.use_inferences(desks[1])
        finally:
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)


async def submitted(stage: Stage, id: str, value: float, *, as_object: bool = False) -> None:
    stored = packed(InferenceRequest((rows(value),), id=id))
    spec = {"kind": "inference", "entrypoint": "m", "arguments": stored}
    if as_object:
        spec |= {"arguments": b"", "arguments_digest": await stage.blobs.put(stored, owner=id)}
    await stage.submit(id, spec=spec, answered_by="m")


async def cycles_until(stage: Stage, id: str, state: TaskState) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await stage.row(id)).state is not state:
            await stage.leader.cycle()
            await asyncio.sleep(0)


async def answer_to(stage: Stage, id: str) -> list[float]:
    result = await stage.store.result(TaskId(id))
    assert result is not None
    assert (result.format, result.ending) == ("tensors", "succeeded")
    return values_of(response_in(result.data or b"").outputs[0])


async def test_a_leader_has_inferences_answered_and_keeps_the_answers(tmp_path: Path) -> None:
    async with a_leader(tmp_path, Doubling()) as (stage, _):
        await submitted(stage, "a", 1)
        await submitted(stage, "b", 2, as_object=True)
        for id, value in (("a", 2.0), ("b", 4.0)):
            await cycles_until(stage, id, TaskState.SUCCEEDED)
            assert await answer_to(stage, id) == [value]


async def test_new_leader_resends_inferences_and_only_one_answer_counts(
    tmp_path: Path,
) -> None:
    older, newer = Doubling(), Doubling()
    async with a_leader(tmp_path, older, newer) as (stage, take_over):
        older.goes_on.clear()
        await submitted(stage, "a", 1)
        await cycles_until(stage, "a", TaskState.RUNNING)
        await until(lambda: older.asked == [[1]])
        newer.goes_on.clear()
        take_over()
        await cycles_until(stage, "a", TaskState.PENDING)
        await cycles_until(stage, "a", TaskState.RUNNING)
        older.goes_on.set()
        await until(lambda: newer.asked == [[1]])
        await stage.leader.cycle()
        assert (await stage.row("a")).state is TaskState.RUNNING, "the older claim's answer is nobody's"
        newer.goes_on.set()
        await cycles_until(stage, "a", TaskState.SUCCEEDED)
        assert ((await stage.row("a")).fence, (await stage.row("a")).failures) == (2, 0)


async def test_an_inference_without_stored_tensors_fails(tmp_path: Path) -> None:
    async with a_leader(tmp_path, Doubling()) as (stage, _):
        spec = {"kind": "inference", "entrypoint": "m", "arguments": b"", "arguments_digest": "0" * 64}
        await stage.submit("a", spec=spec, answered_by="m")
        await cycles_until(stage, "a", TaskState.FAILED)


async def test_one_that_is_cancelled_while_it_is_answered_is_over_at_once(tmp_path: Path) -> None:
    client = Doubling()
    async with a_leader(tmp_path, client) as (stage, _):
        client.goes_on.clear()
        await submitted(stage, "a", 1)
        await cycles_until(stage, "a", TaskState.RUNNING)
        await stage.store.request(Request("r1", TaskId("a"), "default", "cancel", {}, NOW))
        await cycles_until(stage, "a", TaskState.CANCELLED)
