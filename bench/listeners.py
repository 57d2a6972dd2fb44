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
from collections.abc import Coroutine, Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import uvloop

from bench.accept import FULL_SETTINGS, TASK, fill_device
from bench.child_process import ChildProcess, answer_commands
from bench.deployment import Deployment, add_variants, deployed, prefix_of, variants_of
from bench.http import Target
from bench.load import ClosedLoop
from bench.measuring import Figure, Pair, compared, percentile, report
from bench.processes import Service

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


class Listeners(ChildProcess):
    module = "bench.listeners"

    def listen(self, gateways: Sequence[Service], tasks: Sequence[str], unfiltered: int) -> None:
        """Open the streams, spread over the gateways in turn, and wait until each is up to date."""
        ports = [[gateway.port, gateway.token] for gateway in gateways]
        self.ask(gateways=ports, tasks=list(tasks), unfiltered=unfiltered)

    def stop(self, position: int, changes: dict[str, int]) -> Heard:
        """Wait until the streams have reached a position of the log, close them, and return what they
        received. `changes` maps a followed task to the number of its changes."""
        return Heard(**self.ask(position=position, changes=changes))


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
    lost = accepted = 0
    targets = [
        Target(gateway.port, "POST", "/tasks", gateway.headers, json.dumps(TASK))
        for gateway in running.gateways
    ]
    with ClosedLoop() as load, Listeners() as listeners:

        def submits() -> tuple[float, dict[str, int]]:
            """Return the accepted tasks per second, and the changes that were made meanwhile."""
            with Changes(first, tasks) as changes:
                measured = load.measure(*targets, connections=options.connections, seconds=options.seconds)
            nonlocal accepted
            accepted += len(measured.latencies_ms)
            return measured.must_all_be(202).per_second, changes.made

        submits()
        for number in range(1, options.rounds + 1):
            running.wait_until_idle()
            alone, _ = submits()
            running.wait_until_idle()
            listeners.listen(running.gateways, tasks, options.unfiltered)
            beside, made = submits()
            heard = listeners.stop(first.ask("GET", "/events?last=0")["next_after"], made)
            pairs.append(Pair(beside, alone))
            delays_ms += heard.delays_ms
            lost += heard.lost
            behind = percentile(heard.delays_ms, 99)
            report(f"  round {number}: {beside:,.0f}/s, alone {alone:,.0f}/s, p99 {behind:.0f} ms behind")
    name, durability = prefix_of("listeners", variant), running.durability
    yield compared("listeners", f"{name}.accepted", "tasks/s", pairs, accepted, durability)
    values = {
        "lost_events": (float(lost), "events"),
        "p50_ms": (percentile(delays_ms, 50), "ms"),
        "p99_ms": (percentile(delays_ms, 99), "ms"),
        "longest_ms": (max(delays_ms), "ms"),
    }
    for figure, (value, unit) in values.items():
        yield Figure("listeners", f"{name}.{figure}", value, unit, len(delays_ms), durability)


class Changes:
    """Changes the priority of one task after another, in a thread, during the with-block."""

    def __init__(self, gateway: Service, tasks: Sequence[str]) -> None:
        self.made = dict.fromkeys(tasks, 0)
        self._gateway = gateway
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._change)

    def __enter__(self) -> "Changes":
        self._thread.start()
        return self

    def __exit__(self, *_exit: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _change(self) -> None:
        priority = 0
        while not self._is_over.is_set():
            priority = 10 + (priority + 1) % 10
            for task in self.made:
                if self._is_over.is_set():
                    return
                answer = self._gateway.ask("PATCH", f"/tasks/{task}", {"priority": priority})
                self.made[task] += answer["priority"] == priority


# In the process of the listeners.


class _Listener:
    """One stream."""

    def __init__(self, task: str | None) -> None:
        self.task = task
        self.reached = 0
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
            while not all(listener.reached for listener in self._open):  # noqa: ASYNC110  # messages
                await asyncio.sleep(0.01)

    async def _stop(self, position: int, changes: dict[str, int]) -> dict[str, Any]:
        began = {listener: listener.heard[0][0] for listener in self._open if listener.heard}

        def has_arrived(listener: _Listener) -> bool:
            if listener.task is None:
                return listener.reached >= position
            return len(changed(listener)) >= changes[listener.task]

        try:
            async with asyncio.timeout(ARRIVAL_SECONDS):
                while not all(map(has_arrived, self._open)):  # noqa: ASYNC110  # messages
                    await asyncio.sleep(0.01)
        except TimeoutError:
            pass  # What has not come counts as lost.
        lost = 0
        for listener in self._open:
            positions = [one for one, _, _ in listener.heard]
            if listener.task is None:
                first = began.get(listener, position)
                lost += lost_of(positions, range(first, max(position, first) + 1))
            else:
                lost += abs(changes[listener.task] - len(changed(listener)))
            await listener.close()
        return {"delays_ms": [ms for one in self._open for _, _, ms in one.heard], "lost": lost}


def changed(listener: _Listener) -> list[int]:
    return [position for position, kind, _ in listener.heard if kind == "task.changed"]


def lost_of(positions: Sequence[int], expected: range) -> int:
    """Return the number of events that did not arrive exactly once and in their order. Events after the
    expected ones do not count."""
    found = [position for position in positions if position < expected.stop]
    if found == list(expected):
        return 0
    distinct = len(set(found))
    return max(1, len(expected) - distinct + len(found) - distinct)


if __name__ == "__main__":
    answer_commands(_Process().carry_out)
