"""The executor and its driver process: what it does when the driver is silent, slow, or sends nonsense."""

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import ray
import uvloop
from gpubroker.runtime.objects import ObjectRef
from gpubroker_server.adapters.clock import boot_seconds
from gpubroker_server.adapters.ray.driver import executor
from gpubroker_server.adapters.ray.driver import link as driver_link
from gpubroker_server.adapters.ray.driver.executor import NO_TERM, RayExecutor
from gpubroker_server.adapters.ray.driver.node_link import NodeLink
from gpubroker_server.adapters.ray.driver.process import UNTAKEN_BYTES, Driver, Opening
from gpubroker_server.adapters.ray.driver.reports import MALFORMED
from gpubroker_server.adapters.ray.options import RayOptions
from gpubroker_server.adapters.ray.wire import PROTOCOL, frame, read_frame, unpack, write_reports
from gpubroker_server.core.domain.leader_term import LeaderTerm
from gpubroker_server.core.domain.orders import Ended, Ending, ForgetOrder, Gone, NodeReport, StartOrder
from gpubroker_server.core.domain.submission import ItemTerms, SeatTerms
from gpubroker_server.core.domain.units import (
    Fence,
    Instant,
    Lineage,
    MonotonicSeconds,
    NodeName,
    TaskId,
    Term,
)
from gpubroker_server.ports.executor import RunPayload
from gpubroker_server.ports.store import RunSpec
from ray.exceptions import RayError
from structlog.testing import capture_logs

from tests.patience import PATIENCE_SECONDS

NODE = {
    "name": "n1",
    "cpu": 2.0,
    "memory_mb": 10,
    "max_runs": 4,
    "incarnation": "i.1",
    "boot_id": "b",
    "release": "",
}
SEEN: tuple[Any, ...] = ("node_seen", 1.0, NODE, [], [])


class Clock:
    def now(self) -> Instant:
        return Instant(1.0)


class StandIn:
    """The test writes the messages of the driver; the process itself only waits."""

    def __init__(self, child: "subprocess.Popen[bytes]", channel: socket.socket) -> None:
        self.child = child
        self._channel = channel

    async def meet(self) -> "StandIn":
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._channel)
        await self.next("127.0.0.1")
        self.say("connected")
        return self

    def say(self, *parts: Any) -> None:
        self._writer.write(frame(*parts))

    def send_reports(self, *reports: tuple[Any, ...], protocol: int = PROTOCOL) -> None:
        self.say("reports", write_reports("n1", 1.0, reports, protocol=protocol), boot_seconds(), 1)

    async def next(self, kind: str | tuple[str, ...]) -> tuple[Any, ...]:
        """The next message of this kind, or of one of these; pings are answered meanwhile."""
        while (message := await read_frame(self._reader)) is not None:
            if message[0] == "ping":
                self.say("pong")
            if str(message[0]).startswith(kind):
                return message
        raise AssertionError(f"the service left before it said {kind}")

    def leave(self) -> None:
        self._writer.close()


class Bench:
    """An executor that joins a cluster which only listens, and the drivers it starts."""

    def __init__(self, options: RayOptions) -> None:
        self.executor = RayExecutor(options, Clock())
        self._drivers: asyncio.Queue[StandIn] = asyncio.Queue()
        self._starting: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self.lead(LeaderTerm(Term(1)))

    def lead(self, leader_term: LeaderTerm) -> None:
        if self._starting is not None:
            self._starting.cancel()
        self._starting = asyncio.create_task(self.executor.start(leader_term, Lineage(0)))

    def start_driver(
        self, _options: RayOptions, _address: str, channel: socket.socket
    ) -> "subprocess.Popen[bytes]":
        child = subprocess.Popen(["sleep", "60"])
        self._drivers.put_nowait(StandIn(child, channel.dup()))
        return child

    async def started(self) -> StandIn:
        """The next one that is started; it has not said a word."""
        return await self._drivers.get()

    async def driver(self) -> StandIn:
        """The next one that is started, connected."""
        return await (await self.started()).meet()

    async def send(self, task: str, arguments: bytes = b"", **spec: Any) -> None:
        order = StartOrder(TaskId(task), Fence(1), NodeName("n1"), "i.1", (), shareable=False)
        payload = RunPayload(RunSpec("entrypoint", **spec), arguments, None, None, 1, "", "default", None)
        await self.executor.send([order], {order.task: payload})

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        await self.executor.close(stop_cluster=False)


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    async def ignore(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(ignore, "127.0.0.1", 0) as cluster:
        port = cluster.sockets[0].getsockname()[1]
        options = RayOptions(tmp_path, address=f"127.0.0.1:{port}", driver_patience_seconds=0.5)
        bench = Bench(options)
        monkeypatch.setattr(driver_link, "_start_driver", bench.start_driver)
        bench.begin()
        yield bench
        await bench.close()


async def test_a_silent_driver_is_killed_and_replaced(bench: Bench) -> None:
    silent = await bench.driver()
    silent.send_reports(SEEN)
    [seen] = await bench.executor.reports()
    assert isinstance(seen, NodeReport)
    assert bench.executor.status()["state"] == "connected"
    await bench.driver()
    assert silent.child.poll() is not None


async def test_a_driver_that_answers_pings_is_kept(bench: Bench) -> None:
    driver = await bench.driver()
    for _ in range(2 * driver_link.PINGS):
        await driver.next("ping")
    assert driver.child.poll() is None


async def test_the_status_says_why_the_driver_ended(bench: Bench) -> None:
    driver = await bench.driver()
    driver.say("trouble", "Ray has other plans")
    driver.leave()
    await bench.started()
    assert bench.executor.status()["state"] == "failed"
    assert bench.executor.status()["message"] == "Ray has other plans"


async def test_send_never_waits_and_a_start_too_many_is_reported_never_started(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "UNANSWERED_BYTES", 2**20)
    driver = await bench.driver()
    driver.send_reports(SEEN)
    await bench.executor.reports()
    await bench.send("first", b"x" * 2**20)
    await bench.send("second", b"x")
    ended, gone = await bench.executor.reports()
    assert isinstance(ended, Ended)
    assert (ended.task, ended.ending) == ("second", Ending.NEVER_STARTED)
    assert isinstance(gone, Gone)
    assert gone.proof == "never_started"
    _, _, packed, _ = await driver.next("orders")
    assert [order[3]["task"] for order in unpack(packed)] == ["first"]
    driver.send_reports(("started", "first", 1, 0, 1.0, 42))
    await bench.executor.reports()
    await bench.send("third", b"x")
    _, _, packed, _ = await driver.next("orders")
    assert [order[3]["task"] for order in unpack(packed)] == ["third"]


NAMED = ObjectRef("0a" * 32)


@pytest.mark.parametrize(
    ("arguments", "spec"),
    [
        (b"", {"items": ItemTerms(TaskId("a"))}),
        (b"", {"seat": SeatTerms(TaskId("s"))}),
        (b'{"args":[{"object":"%s"}],"kwargs":{}}' % NAMED.id.encode(), {}),
        (cloudpickle.dumps((len, (NAMED,), {})), {}),
        (cloudpickle.dumps((len, (), {"obj": {"object": NAMED.id}})), {}),
    ],
    ids=["a worker of an array", "a worker of a set", "JSON", "a pickled reference", "a pickled id"],
)
async def test_an_agent_of_an_earlier_release_gets_no_array_no_set_and_no_object(
    bench: Bench, arguments: bytes, spec: dict[str, Any]
) -> None:
    """It would call the function without an item or with the name of the object, or end with what the class
    makes, and say all is well."""
    driver = await bench.driver()
    driver.send_reports(SEEN, protocol=8)
    await bench.executor.reports()
    await bench.send("new", arguments, **spec)
    ended, gone = await bench.executor.reports()
    assert isinstance(ended, Ended)
    assert (ended.task, ended.ending) == ("new", Ending.NEVER_STARTED)
    assert isinstance(gone, Gone)
    await bench.send("other", cloudpickle.dumps((len, ({"object": "a"}, "0a" * 33), {})))
    _, _, packed, _ = await driver.next("orders")
    assert [order[3]["task"] for order in unpack(packed)] == ["other"]


async def test_a_run_with_a_malformed_report_has_failed_and_is_killed(bench: Bench) -> None:
    driver = await bench.driver()
    driver.send_reports(SEEN, ("progressed", "t", 3, 0, 1.0, "half", ""))
    _, ended = await bench.executor.reports()
    assert isinstance(ended, Ended)
    assert ended.failure is not None
    assert ended.failure.kind == MALFORMED
    _, node, packed, _ = await driver.next("orders")
    assert (node, unpack(packed)) == ("n1", (("stop", "t", 3, 0, "cancel", 0.0),))


async def test_the_driver_learns_when_reports_were_taken(bench: Bench) -> None:
    driver = await bench.driver()
    driver.send_reports(SEEN)
    await driver.next("ping")
    await bench.executor.reports()
    _, taken_bytes = await driver.next("taken")
    assert taken_bytes == len(write_reports("n1", 1.0, [SEEN]))


async def test_agents_are_not_polled_while_the_service_has_too_much_to_take() -> None:
    ours, theirs = socket.socketpair()
    reader, _theirs = await asyncio.open_unix_connection(sock=theirs, limit=2 * UNTAKEN_BYTES)
    _reader, writer = await asyncio.open_unix_connection(sock=ours)
    async with asyncio.TaskGroup() as tasks:
        driver = Driver(Opening("", "", "", "", 0, 1, 0), writer, tasks)
        await driver.room()
        reading = tasks.create_task(read_frame(reader))
        await driver.send_reports(b"x" * (UNTAKEN_BYTES + 1), 0.0, 1)
        waiting = tasks.create_task(driver.room())
        await reading
        assert not waiting.done()
        await driver.on_message(("taken", 1))
    assert waiting.done()


async def test_orders_carry_the_end_of_the_term_and_none_is_sent_after_it(bench: Bench) -> None:
    driver = await bench.driver()
    leader_term = LeaderTerm(Term(2), MonotonicSeconds(boot_seconds() + 600.0))
    bench.lead(leader_term)
    assert (await driver.next("term"))[2] == NO_TERM
    assert (await driver.next("term"))[2] == 2
    driver.say("reports", write_reports("n1", 1.0, [SEEN]), boot_seconds(), 2)
    await bench.executor.reports()
    await bench.send("in-time")
    *_, until = await driver.next("orders")
    assert until == leader_term.until
    leader_term.is_over(MonotonicSeconds(until))
    await bench.send("too-late")
    await bench.executor.stand_back()
    assert (await driver.next(("orders", "term")))[0] == "term"


async def test_reports_of_an_earlier_term_are_dropped(bench: Bench) -> None:
    """They may omit runs that another leader has started since."""
    driver = await bench.driver()
    driver.send_reports(SEEN)
    await bench.executor.reports()
    await driver.next("taken")
    bench.lead(LeaderTerm(Term(3)))
    while (await driver.next("term"))[2] != 3:
        pass
    driver.send_reports(SEEN)
    _, taken_bytes = await driver.next("taken")
    assert taken_bytes == len(write_reports("n1", 1.0, [SEEN]))
    news: tuple[Any, ...] = ("node_seen", 2.0, {**NODE, "incarnation": "i.3"}, [], [])
    driver.say("reports", write_reports("n1", 2.0, [news]), boot_seconds(), 3)
    [seen] = await bench.executor.reports()
    assert isinstance(seen, NodeReport)
    assert seen.node.incarnation == "i.3"


async def test_flush_sends_orders_that_wait_for_others(bench: Bench) -> None:
    driver = await bench.driver()
    driver.send_reports(SEEN)
    await bench.executor.reports()
    await bench.executor.send([ForgetOrder(TaskId("t"), Fence(1), NodeName("n1"), "i.1")], {})
    flushing = asyncio.create_task(bench.executor.flush())
    assert (await driver.next(("orders", "flush")))[0] == "orders"
    await driver.next("flush")
    assert not flushing.done()
    driver.say("flushed")
    await flushing


async def test_flush_does_not_wait_for_a_driver_that_is_gone(bench: Bench) -> None:
    driver = await bench.driver()
    flushing = asyncio.create_task(bench.executor.flush())
    await driver.next("flush")
    driver.leave()
    await flushing


async def test_an_executor_that_stood_back_is_on_standby_and_drops_reports(bench: Bench) -> None:
    driver = await bench.driver()
    driver.send_reports(SEEN)
    await bench.executor.reports()
    await bench.executor.stand_back()
    assert bench.executor.status()["state"] == "standby"
    hearing = asyncio.create_task(bench.executor.reports())
    driver.send_reports(SEEN)
    await driver.next("taken")
    await driver.next("taken")
    assert not hearing.done()
    hearing.cancel()


async def test_orders_that_reach_the_driver_too_late_are_dropped_and_announced() -> None:
    ours, theirs = socket.socketpair()
    _reader, writer = await asyncio.open_unix_connection(sock=ours)
    with theirs:
        async with asyncio.TaskGroup() as tasks:
            driver = Driver(Opening("", "", "", "", 0, 1, 0), writer, tasks)
            link = Link()
            driver._links["n1"] = link  # type: ignore[assignment]  # what a driver asks of one
            await driver.on_message(("orders", "n1", b"in time", boot_seconds() + 600.0))
            await driver.on_message(("orders", "n1", b"too late", boot_seconds()))
        writer.close()
    assert link.asked == [("send", b"in time"), ("announce_again",)]


class Link:
    """Notes the calls."""

    node = "n1"

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def send(self, packed: bytes) -> None:
        self.asked.append(("send", packed))

    def announce_again(self) -> None:
        self.asked.append(("announce_again",))


@pytest.mark.parametrize(
    ("names", "fault"),
    [(["n1", "n1"], "two nodes have one name"), (["n0", "n1/a"], "a --node-name without one")],
)
async def test_a_node_whose_name_is_of_no_use_is_left_out_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, names: list[str], fault: str
) -> None:
    looks = [[ray_node(f"id{n}", name) for n, name in enumerate(names)]] * 3 + [[]]
    monkeypatch.setattr(ray, "nodes", lambda: looks.pop(0))
    monkeypatch.setattr(NodeLink, "_find_agent", no_agent)
    ours, theirs = socket.socketpair()
    _reader, writer = await asyncio.open_unix_connection(sock=ours)
    config = RayOptions(tmp_path).agent_config("").to_json()
    with capture_logs() as logs, theirs:
        async with asyncio.TaskGroup() as tasks:
            driver = Driver(Opening("", "", config, "", 0, 1, 0), writer, tasks)
            while looks:
                await driver._update_links(await driver._nodes())
                assert [*driver._links] == names[:1] * bool(looks)
        writer.close()
    assert [line["node"] for line in logs if fault in line["event"]] == names[1:]


def no_agent(_link: NodeLink) -> None:
    raise RayError("away")


def ray_node(id: str, name: str) -> dict[str, Any]:
    named = {"NodeID": id, "NodeName": name, "NodeManagerAddress": "127.0.0.1"}
    return {**named, "Alive": True, "Resources": {"CPU": 1.0}}


def test_message_to_a_driver_that_has_died_is_dropped() -> None:
    """Otherwise the leader would end with it. The service runs on uvloop, which raises an error here where
    asyncio's own loop drops the message."""

    async def outlive(child: "subprocess.Popen[bytes]") -> None:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        link = driver_link.DriverLink(child, reader, writer, PATIENCE_SECONDS)
        theirs.close()
        while not writer.is_closing():
            link.send("ping")
            await asyncio.sleep(0)
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        link.send("taken", 1)
        await link.close()

    with (
        subprocess.Popen(["sleep", "60"]) as child,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(outlive(child))


def test_pauses_between_failed_starts_of_a_head_grow_up_to_a_minute() -> None:
    pauses = [driver_link.head_pause(failed) for failed in range(7)]
    assert pauses == [0.0, 5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
