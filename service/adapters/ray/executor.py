"""Implements `ports.Executor` on Ray: keeps a driver process, hands it orders, brings reports back."""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from service.adapters.ray.frames import frame, read_frame
from service.adapters.ray.head import (
    HeadRefused,
    HeadState,
    ray_environment,
    running_head,
    stop_head,
)
from service.adapters.ray.options import RayOptions
from service.adapters.ray.processes import Watched
from service.adapters.ray.wire import OrderForm, ReportForm, key_of, pack
from service.core.orders import (
    Ended,
    Ending,
    ForgetOrder,
    Gone,
    NodeLost,
    NodeSeen,
    Order,
    Report,
    StartOrder,
)
from service.core.units import Fence, Instant, NodeName, TaskId, Term
from service.ports import Clock, RunPayload

log = logging.getLogger("gpubroker.ray")

START_PATIENCE_SECONDS = 30.0
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0
LEAVE_SECONDS = 10.0
FORGET_SECONDS = 0.05
"""To forget a run is never urgent: it travels with the next order, or so much later."""
LOG_BYTES = 4 * 2**20

RunId = tuple[TaskId, Fence, int]


class RayExecutor:
    """Survives the loss of its driver process, of an agent and of a local head: it gets new ones.

    Orders for a node that cannot be reached wait until it can; its agent then says which came too late. Every
    start is answered in the end, if only by the word of a later agent that it never arrived.
    """

    def __init__(self, options: RayOptions, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self._order_form = OrderForm(options.result_limit_bytes, options.checkpoint_limit_bytes)
        self._report_form = ReportForm(options.cluster, clock.now)
        self._broker = uuid4().hex
        self._term = Term(0)
        self._keeping: asyncio.Task[None] | None = None
        self._finding: asyncio.Future[HeadState] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._seen: dict[NodeName, str] = {}
        """Nodes whose agent has answered through the present driver, and their incarnation."""
        self._held: dict[NodeName, deque[bytes]] = {}
        self._written: dict[NodeName, list[Any]] = {}
        """Orders that wait for company on their way."""
        self._later: asyncio.TimerHandle | None = None
        self._unanswered: dict[RunId, NodeName] = {}
        """Starts of which no report has come yet."""
        self._reports: list[Report] = []
        self._arrived = asyncio.Event()
        self._ready = asyncio.Event()
        self._left = asyncio.Event()
        self._state, self._message, self._address = "stopped", "not started", options.address or ""

    async def start(self, term: Term) -> None:
        """Back when the first agent has answered, or after 30 s; it goes on trying in the background."""
        self._term = term
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep())
        else:
            self._dispatch_rest()
            self._tell("term", term)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_PATIENCE_SECONDS):
                await self._ready.wait()

    async def send(self, orders: Sequence[Order], payloads: Mapping[TaskId, RunPayload]) -> None:
        """A start without a payload is left out: its run ended between commit and dispatch."""
        urgent = set()
        for order in orders:
            payload = payloads.get(order.task)
            if isinstance(order, StartOrder):
                if payload is None:
                    continue
                self._unanswered[order.task, order.fence, order.rank] = order.node
            if not isinstance(order, ForgetOrder):
                urgent.add(order.node)
            self._written.setdefault(order.node, []).append(self._order_form.write(order, payload))
        for node in urgent:
            self._dispatch(node)
        if self._written and self._later is None:
            self._later = asyncio.get_running_loop().call_later(FORGET_SECONDS, self._dispatch_rest)
        if self._writer is not None:
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()

    async def reports(self) -> Sequence[Report]:
        while not self._reports:
            self._arrived.clear()
            await self._arrived.wait()
        reports, self._reports = self._reports, []
        return reports

    def status(self) -> Mapping[str, Any]:
        return {"state": self._state, "address": self._address, "message": self._message}

    async def close(self, *, stop_cluster: bool) -> None:
        """With `stop_cluster` every run is killed and a local head ends; a joined cluster stays up."""
        if stop_cluster and not self._options.is_local and self._writer is not None:
            self._tell("leave")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_SECONDS):
                    await self._left.wait()
        if self._later is not None:
            self._later.cancel()
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._finding is not None:
            await asyncio.gather(self._finding, return_exceptions=True)
        if stop_cluster and self._options.is_local:
            await stop_head(self._options.data_dir)
        self._state, self._message = "stopped", "closed"

    def _dispatch(self, node: NodeName) -> None:
        packed = pack(self._written.pop(node))
        if node in self._seen:
            self._tell("orders", node, packed)
        else:
            self._held.setdefault(node, deque()).append(packed)

    def _dispatch_rest(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
        for node in list(self._written):
            self._dispatch(node)

    async def _keep(self) -> None:
        """One driver after another, and a local head for it where none was given."""
        pause = FIRST_PAUSE_SECONDS
        self._state, self._message = "starting", "connecting to Ray"
        while True:
            self._ready.clear()
            try:
                head = await self._find_head() if self._options.is_local else None
                self._address = head.address if head is not None else self._address
                await self._drive(head)
                self._state = "reconnecting"
                log.warning("the Ray driver process ended: %s; starting another", self._message)
            except (HeadRefused, OSError) as fault:
                self._state, self._message = "failed", str(fault)
                log.error("Ray cannot be reached: %s", fault)
            except Exception as fault:
                self._state, self._message = "failed", repr(fault)
                log.exception("the Ray driver process is given up; starting another")
            pause = FIRST_PAUSE_SECONDS if self._seen else min(2 * pause, LONGEST_PAUSE_SECONDS)
            self._seen.clear()
            await asyncio.sleep(pause)

    async def _find_head(self) -> HeadState:
        """Not cut short by `close`: a head that nobody knows of would stay behind."""
        self._finding = asyncio.ensure_future(running_head(self._options))
        return await asyncio.shield(self._finding)

    async def _drive(self, head: HeadState | None) -> None:
        """Back when the driver has ended. A head that ends takes the driver with it."""
        ours, theirs = socket.socketpair()
        with theirs:
            child = self._start_driver(theirs)
        watched = None
        try:
            watched = Watched(head.process, child.kill) if head is not None else None
            reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            self._writer.write(frame(*self._opening(head)))
            while (message := await read_frame(reader)) is not None:
                self._on_message(message)
            if watched is not None and watched.ended:
                self._lose_nodes("the local Ray head ended")
        except ProcessLookupError:
            self._message = "the local Ray head ended"
        finally:
            if watched is not None:
                watched.close()
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            child.kill()
            child.wait()

    def _start_driver(self, channel: socket.socket) -> "subprocess.Popen[bytes]":
        options = self._options
        environment = {name: text for name, text in os.environ.items() if name != "RAY_ADDRESS"}
        with _log_of(options.data_dir).open("ab") as output:
            return subprocess.Popen(  # noqa: S603  # our own module
                [sys.executable, "-m", "service.adapters.ray.driver", str(channel.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment | ray_environment(options),
                pass_fds=(channel.fileno(),),
                start_new_session=True,
            )

    def _opening(self, head: HeadState | None) -> tuple[Any, ...]:
        options = self._options
        config = options.agent_config(str(head.keepalive) if head is not None else "").to_json()
        local_node = options.node_name if options.is_local else ""
        return self._address, local_node, config, self._broker, self._term

    def _on_message(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("reports", packed):
                for report in self._report_form.read(packed):
                    self._on_report(report)
            case ("connected",):
                self._message = "waiting for node agents"
            case ("trouble", what):
                self._message = what
            case ("left",):
                self._left.set()

    def _on_report(self, report: Report) -> None:
        key = key_of(report)
        if key is not None:
            self._unanswered.pop(key, None)
        self._say(report)
        if isinstance(report, NodeSeen):
            self._on_node(report)
        elif isinstance(report, NodeLost):
            self._seen.pop(report.node, None)

    def _on_node(self, seen: NodeSeen) -> None:
        """This agent starts nothing ordered before it answered: what it does not have has never begun."""
        name = seen.node.name
        there = set(seen.runs)
        for task, fence, rank in [run for run, node in self._unanswered.items() if node == name]:
            if (task, fence) not in there:
                del self._unanswered[task, fence, rank]
                self._say(Ended(task, fence, seen.at, Ending.NEVER_STARTED, rank=rank))
                self._say(Gone(task, fence, seen.at, "never_started", rank=rank))
        self._seen[name] = seen.node.incarnation
        for packed in self._held.pop(name, ()):
            self._tell("orders", name, packed)
        self._state, self._message = "connected", f"{len(self._seen)} nodes answer"
        self._ready.set()

    def _lose_nodes(self, why: str) -> None:
        now = Instant(self._clock.now())
        for name, incarnation in self._seen.items():
            self._say(NodeLost(name, incarnation, now, why))
        self._message = why

    def _say(self, report: Report) -> None:
        self._reports.append(report)
        self._arrived.set()

    def _tell(self, *parts: Any) -> None:
        if self._writer is not None:
            self._writer.write(frame(*parts))


def _log_of(data_dir: Path) -> Path:
    """Where drivers write; begun anew when it has grown large."""
    path = data_dir / "ray-driver.log"
    if path.exists() and path.stat().st_size > LOG_BYTES:
        path.unlink()
    return path
