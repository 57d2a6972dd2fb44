"""Event streams beside a load of submits: how far each event is behind its commit, and what the streams cost.

Most listeners follow one task each, and some the whole log. Meanwhile tasks are submitted as fast as they are
accepted, and the priority of each followed task changes. The same load runs without listeners, in turn. The
delay is counted from the time in the event, which the database takes before it writes the commit, to the
bytes in the listener's process, on the same machine. An event that is missing, out of order or sent twice
counts as lost.
"""

import asyncio
import json
import re
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import cycle
from typing import Any, NamedTuple

import uvloop

from bench.accept import FULL_SETTINGS, TASK, fill_device
from bench.child_process import ChildProcess, answer_commands
from bench.deployment import Deployment, add_variants, deployed, prefix_of, variants_of
from bench.http import Target
from bench.load import ClosedLoop
from bench.measuring import Figure, Pair, compared, percentile, report
from bench.processes import Service

PRIORITIES = 7
"""The number of priorities that tasks get in turn. It must not divide the number of tasks: a task whose
priority stays the same has no event."""
OPEN_SECONDS = 120.0
ARRIVAL_SECONDS = 30.0
"""The time in which the last events must arrive after the load has ended."""

_MESSAGE = re.compile(rb'^id: (\d+)\nevent: ([^\n]*)\ndata: \{"position":\d+,"at":"([^"]*)"')


def add_options(parser: ArgumentParser) -> None:
    add_variants(parser)
    parser.add_argument("--listeners", type=int, default=500, help="listeners that follow one task each")
    parser.add_argument("--unfiltered", type=int, default=10, help="listeners that follow the whole log")
    parser.add_argument("--connections", type=int, default=32, help="keep-alive connections that submit")
    parser.add_argument("--rounds", type=int, default=5, help="rounds to measure")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of load per round and side")


class Heard(NamedTuple):
    """The events that listeners received in a round."""

    delays_ms: list[float]
    lost: int


class Load(NamedTuple):
    per_second: float
    cpu_us: float
    """The CPU time of the service for each accepted task."""


class Listeners(ChildProcess):
    module = "bench.listeners"

    def listen(self, gateways: Sequence[Service], tasks: Sequence[str], unfiltered: int) -> None:
        """Open the streams, spread over the gateways in turn, and wait until each is up to date."""
        ports = [[gateway.port, gateway.token] for gateway in gateways]
        self.ask(gateways=ports, tasks=list(tasks), unfiltered=unfiltered)

    def stop(self, positions: Sequence[int], changes: Mapping[str, Sequence[int]]) -> Heard:
        """Wait until the streams have had these positions of the log, close them, and return what they
        received. `changes` maps a followed task to the positions of its changes."""
        return Heard(**self.ask(positions=list(positions), changes=dict(changes)))


def measure(options: Namespace) -> Iterator[Figure]:
    streams = options.listeners + options.unfiltered
    limits = json.dumps({"event_streams": streams, "token_event_streams": streams})
    for variant in variants_of(options):
        with deployed(variant, **FULL_SETTINGS, LIMITS=limits) as running:
            fill_device(running)
            yield from _measured(running, variant, options)


def _measured(running: Deployment, variant: str, options: Namespace) -> Iterator[Figure]:
    first = running.gateways[0]
    tasks = [first.ask("POST", "/tasks", TASK)["id"] for _ in range(options.listeners)]
    pairs: list[Pair] = []
    delays_ms: list[float] = []
    cpu: list[Pair] = []
    lost = accepted = 0
    targets = [
        Target(gateway.port, "POST", "/tasks", gateway.headers, json.dumps(TASK))
        for gateway in running.gateways
    ]
    with ClosedLoop() as load, Listeners() as listeners:

        def submits() -> Load:
            """Accept tasks as fast as possible, while the followed tasks change."""
            before = cpu_seconds_of(running)
            with changing(first, tasks):
                measured = load.measure(*targets, connections=options.connections, seconds=options.seconds)
            count = len(measured.must_all_be(202).latencies_ms)
            nonlocal accepted
            accepted += count
            return Load(measured.per_second, 1e6 * (cpu_seconds_of(running) - before) / count)

        submits()
        for number in range(1, options.rounds + 1):
            running.wait_until_idle()
            alone = submits()
            running.wait_until_idle()
            start = head_of(first)
            listeners.listen(running.gateways, tasks, options.unfiltered)
            beside = submits()
            heard = listeners.stop(range(start + 1, head_of(first) + 1), changes_of(first, tasks, start))
            pairs.append(Pair(beside.per_second, alone.per_second))
            cpu.append(Pair(beside.cpu_us, alone.cpu_us))
            delays_ms += heard.delays_ms
            lost += heard.lost
            behind = percentile(heard.delays_ms, 99)
            report(
                f"  round {number}: {beside.per_second:,.0f}/s, {beside.cpu_us:,.0f} µs; alone "
                f"{alone.per_second:,.0f}/s, {alone.cpu_us:,.0f} µs; p99 {behind:.0f} ms behind"
            )
    name, durability = prefix_of("listeners", variant), running.durability
    yield compared("listeners", f"{name}.accepted", "tasks/s", pairs, accepted, durability)
    yield compared("listeners", f"{name}.cpu_us", "us/task", cpu, accepted, durability)
    values = {
        "lost_events": (float(lost), "events"),
        "p50_ms": (percentile(delays_ms, 50), "ms"),
        "p99_ms": (percentile(delays_ms, 99), "ms"),
        "longest_ms": (max(delays_ms), "ms"),
    }
    for figure, (value, unit) in values.items():
        yield Figure("listeners", f"{name}.{figure}", value, unit, len(delays_ms), durability)


def cpu_seconds_of(running: Deployment) -> float:
    """Return the CPU time that the processes of the service have used."""
    processes = [gateway.process for gateway in running.gateways]
    broker = [] if running.broker is None else [running.broker]
    return float(sum(sum(process.cpu_times()[:2]) for process in (*processes, *broker)))


@contextmanager
def changing(gateway: Service, tasks: Sequence[str]) -> Iterator[None]:
    """Change the priority of one task after another, in a thread, during the with-block."""
    is_over = threading.Event()

    def change() -> None:
        for task, priority in zip(cycle(tasks), cycle(range(10, 10 + PRIORITIES)), strict=False):
            if is_over.is_set():
                return
            gateway.ask("PATCH", f"/tasks/{task}", {"priority": priority})

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def head_of(gateway: Service) -> int:
    """Return the position of the newest event of the log."""
    return int(gateway.ask("GET", "/events?last=0")["next_after"])


def changes_of(gateway: Service, tasks: Sequence[str], after: int) -> dict[str, list[int]]:
    """Return the positions of the changes of each task after a position of the log."""
    found: dict[str, list[int]] = {task: [] for task in tasks}
    while True:
        page = gateway.ask("GET", f"/events?kind=task.changed&limit=500&after={after}")
        for event in page["items"]:
            if event["key"] in found:
                found[event["key"]].append(event["position"])
        if page["next_after"] == after:
            return found
        after = page["next_after"]


# In the process of the listeners.


class _Listener:
    """Reads one stream, and notes what it heard and when."""

    def __init__(self, task: str | None) -> None:
        self.task = task
        self.began = self.reached = 0
        """The positions up to which the log was read when the stream began, and now."""
        self.heard: list[tuple[int, str, float]] = []
        """The position, the kind and the delay in ms of each event."""
        self._writer: asyncio.StreamWriter | None = None

    async def open(self, port: int, token: str) -> None:
        path = "/events" if self.task is None else f"/tasks/{self.task}/events"
        head = (
            f"GET {path}?last=0 HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAccept: text/event-stream\r\n"
            f"Authorization: Bearer {token}\r\n\r\n"
        )
        reader, self._writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        self._writer.write(head.encode())
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{path}: {status.decode()}")
        await reader.readuntil(b"\r\n\r\n")
        self._reading = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        begun = b""
        while size_bytes := int(await reader.readline(), 16):
            data = await reader.readexactly(size_bytes + 2)
            now = time.time()
            *whole, begun = (begun + data[:-2]).split(b"\n\n")
            for message in whole:
                self._take(message, now)

    def _take(self, message: bytes, now: float) -> None:
        if (found := _MESSAGE.match(message)) is not None:
            at = datetime.fromisoformat(found[3].decode()).timestamp()
            self.heard.append((int(found[1]), found[2].decode(), 1000 * (now - at)))
            self.reached = int(found[1])
        elif b"\nid: " in message:
            self.reached = max(self.reached, int(message.rpartition(b": ")[2]))
            self.began = self.began or self.reached

    async def close(self) -> None:
        self._reading.cancel()
        assert self._writer is not None
        self._writer.close()


class _Process:
    """The loop of the listeners, in a thread of its own, since commands are read from stdin."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._open: list[_Listener] = []

    def carry_out(self, **command: Any) -> Any:
        if "gateways" in command:
            return self._run(self._listen(**command))
        return self._run(self._stop(**command))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _listen(self, gateways: list[tuple[int, str]], tasks: list[str], unfiltered: int) -> None:
        self._open = [*map(_Listener, tasks), *(_Listener(None) for _ in range(unfiltered))]
        async with asyncio.timeout(OPEN_SECONDS):
            for number, listener in enumerate(self._open):
                await listener.open(*gateways[number % len(gateways)])
            while not all(listener.began for listener in self._open):  # noqa: ASYNC110  # messages
                await asyncio.sleep(0.01)

    async def _stop(self, positions: list[int], changes: dict[str, list[int]]) -> dict[str, Any]:
        def expected(listener: _Listener) -> list[int]:
            of_log = positions if listener.task is None else changes[listener.task]
            return [position for position in of_log if position > listener.began]

        last = {listener: max(expected(listener), default=0) for listener in self._open}
        with suppress(TimeoutError):  # What has not come counts as lost.
            async with asyncio.timeout(ARRIVAL_SECONDS):
                while any(listener.reached < last[listener] for listener in self._open):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)  # while messages arrive
        lost = 0
        for listener in self._open:
            found = [
                position
                for position, kind, _ in listener.heard
                if listener.task is None or kind == "task.changed"
            ]
            lost += lost_of(found, expected(listener))
            await listener.close()
        return {"delays_ms": [ms for one in self._open for _, _, ms in one.heard], "lost": lost}


def lost_of(positions: Sequence[int], expected: Sequence[int]) -> int:
    """Return the number of events that did not arrive exactly once and in their order. Events after the last
    expected one do not count."""
    last = expected[-1] if expected else 0
    found = [position for position in positions if position <= last]
    if found == list(expected):
        return 0
    distinct = len(set(found))
    return max(1, len(expected) - distinct + len(found) - distinct)


if __name__ == "__main__":
    answer_commands(_Process().carry_out)
