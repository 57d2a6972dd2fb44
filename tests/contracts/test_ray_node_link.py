"""The conversation with one node agent, when it does not go as it should."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from gpubroker_server.adapters.ray.driver import node_link
from gpubroker_server.adapters.ray.driver.node_link import NodeLink
from gpubroker_server.adapters.ray.options import RayOptions
from gpubroker_server.adapters.ray.wire import PROTOCOL, SPOKEN
from ray.exceptions import RayError


class Call:
    """A method of an actor handle. The test answers each call."""

    def __init__(self) -> None:
        self._made: asyncio.Queue[asyncio.Future[Any]] = asyncio.Queue()
        self.said: list[tuple[Any, ...]] = []

    def remote(self, *arguments: Any) -> "asyncio.Future[Any]":
        self.said.append(arguments)
        reply = asyncio.get_running_loop().create_future()
        self._made.put_nowait(reply)
        return reply

    async def made(self) -> "asyncio.Future[Any]":
        return await self._made.get()

    async def answer(self, reply: Any) -> None:
        (await self.made()).set_result(reply)


class Agent:
    def __init__(self) -> None:
        self.announce, self.poll, self.orders, self.leave = Call(), Call(), Call(), Call()


class Received:
    """Implements `node_link.ReportListener`."""

    def __init__(self) -> None:
        self.reports: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self.has_room = asyncio.Event()
        self.has_room.set()

    async def send(self, *parts: Any) -> None:
        self.reports.put_nowait(parts)

    async def send_reports(self, packed: bytes, asked_at: float, term: int) -> None:
        self.reports.put_nowait(("reports", packed))

    async def room(self) -> None:
        await self.has_room.wait()


class Talk:
    """A link whose agents are the test's, and what it reports."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.received = Received()
        self.found: asyncio.Queue[Agent] = asyncio.Queue()
        self.killed: list[Agent] = []
        self.faults: list[Exception] = []
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(ray, "kill", self.killed.append)
        monkeypatch.setattr(NodeLink, "_find_agent", lambda _link: self._find())

    def _find(self) -> Agent:
        """In a thread, as Ray's own."""
        if self.faults:
            raise self.faults.pop()
        agent = Agent()
        self._loop.call_soon_threadsafe(self.found.put_nowait, agent)
        return agent


@pytest.fixture
def talking(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    @asynccontextmanager
    async def talk(*faults: Exception, term: int = 1) -> AsyncIterator[tuple[Talk, NodeLink]]:
        config = RayOptions(tmp_path).agent_config("").on_node("n1")
        scene = Talk(monkeypatch)
        scene.faults += faults
        async with asyncio.TaskGroup() as tasks:
            link = NodeLink("ray-node", config, "broker", 0, term, scene.received, tasks)
            yield scene, link
            link.close()

    return talk


async def test_an_agent_that_never_answers_an_announcement_is_replaced(
    talking: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_link, "ANNOUNCE_SECONDS", 0.02)
    async with talking() as (scene, _link):
        hung = await scene.found.get()
        assert "did not answer" in (await scene.received.reports.get())[1]
        await scene.found.get()
        assert scene.killed[0] is hung


async def test_an_agent_that_starts_after_a_silent_one_gets_twice_as_long(
    talking: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_link, "ANNOUNCE_SECONDS", 0.02)
    async with talking() as (scene, _link):
        said = [(await scene.received.reports.get())[1] for _ in range(3)]
        assert [text.rpartition("within ")[2] for text in said] == ["0.02 s", "0.04 s", "0.08 s"]


async def test_orders_that_did_not_arrive_lead_to_another_announcement(
    talking: Callable[..., Any],
) -> None:
    async with talking() as (scene, link):
        agent = await scene.found.get()
        await agent.announce.answer(("welcome", "i.1"))
        await agent.poll.made()
        link.send(b"orders")
        (await agent.orders.made()).set_exception(RayError("on their way"))
        again = await scene.found.get()
        await again.announce.made()
        assert scene.killed == []


@pytest.mark.parametrize("fault", [RuntimeError("of ray.kill"), KeyError("unforeseen"), RayError("foreseen")])
async def test_no_fault_ends_the_conversation_for_good(talking: Callable[..., Any], fault: Exception) -> None:
    async with talking(fault) as (scene, _link):
        assert "n1 is away" in (await scene.received.reports.get())[1]
        agent = await scene.found.get()
        await agent.announce.answer(("welcome", "i.1"))
        await agent.poll.answer((1, b"reports"))
        assert await scene.received.reports.get() == ("reports", b"reports")


async def test_an_agent_is_not_polled_while_there_is_no_room(talking: Callable[..., Any]) -> None:
    async with talking() as (scene, link):
        scene.received.has_room.clear()
        agent = await scene.found.get()
        await agent.announce.answer(("welcome", "i.1"))
        link.send(b"orders")
        await agent.orders.answer(None)
        polled = asyncio.ensure_future(agent.poll.made())
        await asyncio.sleep(0)
        assert not polled.done()
        scene.received.has_room.set()
        await polled


async def welcomed(scene: Talk, incarnation: str = "i.1") -> Agent:
    agent = await scene.found.get()
    await agent.announce.answer(("welcome", incarnation))
    return agent


async def test_a_standby_calls_no_agent(talking: Callable[..., Any]) -> None:
    async with talking(term=0) as (scene, link):
        await link._talking
        assert scene.found.empty()
        link.change_term(0, 7)
        await welcomed(scene)
        await link.dismiss()


async def test_orders_of_an_earlier_term_are_not_delivered_in_a_later_one(
    talking: Callable[..., Any],
) -> None:
    async with talking() as (scene, link):
        await scene.found.get()  # it hears the announcement of term 1, and does not answer
        link.send(b"of term 1")
        link.change_term(0, 2)
        link.send(b"of term 2")
        agent = await welcomed(scene)
        await agent.orders.answer(None)
        assert [arguments[-1] for arguments in agent.orders.said] == [b"of term 2"]


async def test_a_former_leader_can_dismiss_its_agents_and_a_standby_cannot(
    talking: Callable[..., Any],
) -> None:
    async with talking() as (scene, link):
        agent = await welcomed(scene)
        await agent.poll.made()
        link.change_term(0, 0)
        dismissing = asyncio.create_task(link.dismiss())
        await agent.leave.answer(None)
        await dismissing
    async with talking(term=0) as (scene, link):
        await link.dismiss()
        assert scene.found.empty()


async def test_agent_of_the_last_release_is_ordered_in_its_form_and_replaced(
    talking: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is replaced on request. This software stands in for one that also speaks the next form."""
    monkeypatch.setattr(node_link, "SPOKEN", (PROTOCOL, PROTOCOL + 1))
    async with talking() as (scene, link):
        old = await scene.found.get()
        await old.announce.answer(("outdated", "protocol 6"))
        await old.announce.answer(("welcome", "i.1"))
        link.send(b"orders")
        await old.orders.answer(None)
        assert [said[0] for said in old.announce.said] == [PROTOCOL + 1, PROTOCOL]
        assert old.orders.said == [(PROTOCOL, 0, 1, b"orders")]
        assert scene.killed == []

        await link.replace()
        assert scene.killed == [old]
        await welcomed(scene)


async def test_an_agent_that_shares_no_form_is_replaced(talking: Callable[..., Any]) -> None:
    async with talking() as (scene, _link):
        stranger = await scene.found.get()
        for _ in SPOKEN:
            await stranger.announce.answer(("outdated", "protocol 1"))
        await welcomed(scene)
        assert scene.killed == [stranger]


async def test_a_link_is_flushed_when_the_agent_has_taken_all_orders(talking: Callable[..., Any]) -> None:
    async with talking() as (scene, link):
        await link.flush()
        agent = await welcomed(scene)
        await agent.poll.made()
        orders = [b"order %d" % number for number in range(2 * node_link.CALLS_AT_ONCE)]
        for packed in orders:
            link.send(packed)
        flushing = asyncio.create_task(link.flush())
        for _ in orders:
            await asyncio.sleep(0)
            assert not flushing.done()
            await agent.orders.answer(None)
        await flushing
        assert [arguments[-1] for arguments in agent.orders.said] == orders


async def test_a_link_whose_agent_is_away_is_flushed_at_once(talking: Callable[..., Any]) -> None:
    async with talking() as (scene, link):
        await scene.found.get()
        link.send(b"orders")
        await link.flush()
