"""The Ray driver: an expendable process that talks to Ray, so that the service survives any fault of Ray.

The program is started as `python -m gpubroker_server.adapters.ray.driver.process CHANNEL LOG LEVEL FORM`;
CHANNEL and LOG are file descriptors. The driver reads frames of orders from the service and writes frames of
reports; it passes on the contents of both unread. It ends when the service is gone or when any part of it
fails; the service then starts another one. The runs go on.

The driver's own log lines go to LOG. The lines that Ray prints go to standard output and standard error,
which are another file.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from typing import Any, NamedTuple

import ray
import structlog
from ray._private.state import available_resources_per_node

from gpubroker_server.adapters.clock import boot_seconds
from gpubroker_server.adapters.ray.driver.calls import ActorCalls
from gpubroker_server.adapters.ray.driver.node_link import NodeLink
from gpubroker_server.adapters.ray.options import AgentConfig
from gpubroker_server.adapters.ray.peers import Peer, peers_of
from gpubroker_server.adapters.ray.wire import frame, read_frame
from gpubroker_server.core.domain.units import MIB_BYTES
from gpubroker_server.telemetry.logs import configure_logs

log = structlog.get_logger("gpubroker.driver")

CONNECT_SECONDS = 60.0
"""The time limit for connecting to Ray. Ray itself would try for minutes."""
JOINED_HEAD = (
    "it must be a Ray head; one with a token needs ray.token_file, and one with TLS the certificates of "
    "ray.tls (or RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH and RAY_USE_TLS in this service's environment)"
)
HANGING_HEAD = (
    "the processes of this local head run but do not answer; the service tries again. If that goes on, have "
    "a new head started: `gpubroker down`, which ends all runs, and start the service again"
)
WITHOUT_HEAD = (
    "runs go on, and those that are ordered start, but no node joins; after 60 s "
    "(RAY_gcs_rpc_server_reconnect_timeout_s) Ray ends its nodes with all that runs there"
)
LOOK_SECONDS = 0.25
"""The shortest time between two questions to Ray for its nodes. In a small cluster a question takes half a
millisecond."""
LOOK_SHARE = 0.01
"""The largest share of one core that questions for Ray's nodes take. They are rarer in a large cluster."""
LONGEST_LOOK_SECONDS = 1.0
"""The longest time between two questions to Ray for its nodes, however large the cluster is."""
TELL_SECONDS = 5.0
"""The longest time between two messages to the service with the names of Ray's nodes."""
TRY_SECONDS = 30.0
"""The time between two rounds in which nodes try to connect to other nodes' ports. A node that joins tries at
once."""
STORES_SECONDS = 5.0
"""The shortest time between two questions to Ray for the use of its object stores."""
LOOK_PATIENCE_SECONDS = 3.0
"""The silence of Ray's control service after which it is reported. Agents can be reached without it."""
_STORE = "object_store_memory"
"""Ray's name of the resource that is the room in a node's object store, in bytes."""
UNTAKEN_BYTES = 32 * 2**20
"""The bytes of untaken reports beyond which no agent is polled."""


class Opening(NamedTuple):
    """The first frame, which the service sends to its driver."""

    address: str
    """The address to connect to."""
    local_node: str
    """The name of the only node of a local head; empty for a joined cluster."""
    agent_config: str
    broker: str
    lineage: int
    term: int
    """The term; 0 while another process leads."""
    result_limit_bytes: int
    """The most bytes of the result of a worker's method."""


class CannotConnect(Exception):
    """The driver cannot connect to Ray. The message says where and why."""


def main() -> None:
    channel, lines, level, form = sys.argv[1:]
    configure_logs(level, "json" if form == "json" else "console", os.fdopen(int(lines), "a"))
    asyncio.run(_drive(socket.socket(fileno=int(channel))))


async def _drive(channel: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=channel)
    opening = await read_frame(reader)
    if opening is None:
        return
    try:
        async with asyncio.TaskGroup() as tasks:
            driver = Driver(Opening(*opening), writer, tasks)
            tasks.create_task(driver.follow_nodes())
            while (message := await read_frame(reader)) is not None:
                await driver.on_message(message)
            # Ray's own shutdown may wait for a control service that is gone.
            os._exit(0)
    except* Exception as faults:
        log.exception("a part of the driver failed; it ends")
        with contextlib.suppress(ConnectionError):
            writer.write(frame("trouble", "; ".join(_texts(faults))))
            await writer.drain()
    os._exit(1)


def _texts(faults: BaseExceptionGroup[BaseException]) -> list[str]:
    return [str(fault) if isinstance(fault, CannotConnect) else repr(fault) for fault in faults.exceptions]


class Driver:
    """Follows Ray's nodes and keeps one NodeLink for each. Implements `node_link.ReportListener`."""

    def __init__(self, opening: Opening, writer: asyncio.StreamWriter, tasks: asyncio.TaskGroup) -> None:
        self._opening = opening
        self._writer = writer
        self._tasks = tasks
        self._lineage, self._term = opening.lineage, opening.term
        self._calls = ActorCalls(opening.agent_config, opening.result_limit_bytes)
        self._answering = asyncio.Lock()
        self._links: dict[str, NodeLink] = {}
        """The link of each node, by the node's name."""
        self._left_out: set[str] = set()
        """The Ray nodes that are left out because of their name, and for which that was logged."""
        self._bundles: list[dict[str, float]] = []
        """The bundles for which Ray's autoscaler should have room."""
        self._bundles_changed = asyncio.Event()
        self._are_asked_for = asyncio.Event()
        """Set once Ray has been asked for room for the newest bundles, or asking it has failed."""
        self._untaken_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def follow_nodes(self) -> None:
        """Connect to Ray, then keep one link for each node that is alive. Raises CannotConnect."""
        address = self._opening.address
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await asyncio.to_thread(_connect, address)
        except TimeoutError:
            raise CannotConnect(
                f"Ray at {address} did not accept the connection within {CONNECT_SECONDS:g} s; "
                + (HANGING_HEAD if self._opening.local_node else JOINED_HEAD)
            ) from None
        except Exception as fault:
            raise CannotConnect(f"cannot connect to Ray at {address}: {fault}") from fault
        await self.send("connected")
        self._tasks.create_task(self._request_resources())
        self._tasks.create_task(self._follow_stores())
        known_names, told_at = frozenset[str](), -TELL_SECONDS
        turn, tried_at = 0, time.monotonic()
        while True:
            asked_at = time.monotonic()
            nodes = await self._nodes()
            took_seconds = time.monotonic() - asked_at
            await self._update_links(nodes)
            if is_due := asked_at >= tried_at + TRY_SECONDS:
                turn, tried_at = turn + 1, asked_at
            self._give_peers(nodes, turn, to_all=is_due)
            names = frozenset(_name_of(node) for node in nodes if node["Alive"] and _takes_runs(node))
            if not self._opening.local_node and (names != known_names or asked_at >= told_at + TELL_SECONDS):
                known_names, told_at = names, asked_at
                await self.send("nodes", sorted(names))
            await asyncio.sleep(max(LOOK_SECONDS, min(took_seconds / LOOK_SHARE, LONGEST_LOOK_SECONDS)))

    async def on_message(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("orders", node, packed, until):
                if (link := self._links.get(node)) is not None:
                    self._pass_on(link, packed, until)
            case ("ask", node):
                if (link := self._links.get(node)) is not None:
                    link.announce_again()
            case ("replace", node):
                if (link := self._links.get(node)) is not None:
                    self._tasks.create_task(link.replace())
            case ("ping",):
                await self.send("pong")
            case ("taken", taken_bytes):
                self._change_untaken(-taken_bytes)
            case ("call", number, *call):
                self._tasks.create_task(self._call(number, *call))
            case ("term", lineage, term):
                self._lineage, self._term = lineage, term
                for link in self._links.values():
                    link.change_term(lineage, term)
            case ("resources", bundles):
                self._change_bundles(list(bundles))  # frames hold tuples
            case ("flush",):
                self._tasks.create_task(self._flush())
            case ("leave", dismisses):
                self._tasks.create_task(self._leave(dismisses))

    async def send(self, *parts: Any) -> None:
        self._writer.write(frame(*parts))
        await self._writer.drain()

    async def send_reports(self, packed: bytes, asked_at: float, term: int) -> None:
        self._change_untaken(len(packed))
        await self.send("reports", packed, asked_at, term)

    async def room(self) -> None:
        await self._has_room.wait()

    def _pass_on(self, link: NodeLink, packed: bytes, until: float) -> None:
        """Pass on orders to a node. Orders that come after the end of the term are dropped; at the next
        announcement the agent lists its runs, which shows that they did not arrive."""
        if boot_seconds() < until:
            link.send(packed)
        else:
            log.warning("orders came too late and are dropped", node=link.node)
            link.announce_again()

    def _change_untaken(self, more_bytes: int) -> None:
        self._untaken_bytes += more_bytes
        if self._untaken_bytes > UNTAKEN_BYTES:
            self._has_room.clear()
        else:
            self._has_room.set()

    async def _request_resources(self) -> None:
        """Pass on the newest bundles to Ray, until cancelled. Bundles that come while Ray does not answer
        replace each other."""
        while True:
            await self._bundles_changed.wait()
            self._bundles_changed.clear()
            try:
                await asyncio.to_thread(_request_resources, self._bundles)
            except Exception as fault:
                log.warning("Ray's autoscaler could not be asked for room", fault=repr(fault))
            if not self._bundles_changed.is_set():
                self._are_asked_for.set()

    def _change_bundles(self, bundles: list[dict[str, float]]) -> None:
        self._bundles = bundles
        self._are_asked_for.clear()
        self._bundles_changed.set()

    async def _call(self, number: int, *call: Any) -> None:
        answer = await self._calls.call(*call)
        async with self._answering:  # so that a report waits behind one answer at most
            await self.send("answer", number, answer)

    async def _flush(self) -> None:
        await asyncio.gather(*(link.flush() for link in self._links.values()))
        await self.send("flushed")

    async def _leave(self, dismisses: bool) -> None:
        if self._bundles:  # Ray would keep nodes for them for ever; the next leader asks again at once
            self._change_bundles([])
            await self._are_asked_for.wait()
        if dismisses:
            await asyncio.gather(*(link.dismiss() for link in self._links.values()))
        await self.send("left")

    async def _nodes(self) -> list[dict[str, Any]]:
        """Return Ray's nodes. This waits for Ray's control service as long as Ray does, and reports its
        silence to the service."""
        asking = asyncio.ensure_future(asyncio.to_thread(ray.nodes))
        if not (await asyncio.wait({asking}, timeout=LOOK_PATIENCE_SECONDS))[0]:
            log.warning("Ray's head does not answer", fault=self._opening.address)
            await self.send("head", f"Ray's head at {self._opening.address} does not answer; {WITHOUT_HEAD}")
            await asyncio.wait({asking})
            log.info("Ray's head answers again")
            await self.send("head", "")
        nodes: list[dict[str, Any]] = asking.result()
        return nodes

    async def _follow_stores(self) -> None:
        """Tell the service how much of each node's object store is in use, until cancelled. Ray keeps the
        free part of a store among the node's available resources, and leaves it out if nothing is free."""
        while True:
            asked_at = time.monotonic()
            try:
                available = await asyncio.to_thread(available_resources_per_node)
            except Exception as fault:  # Ray's control service may be away; `_nodes` reports that
                log.debug("Ray does not tell the use of its object stores", fault=repr(fault))
            else:
                used = [
                    (name, max(0, link.store_bytes - int(free.get(_STORE, 0))) // MIB_BYTES)
                    for name, link in self._links.items()
                    if (free := available.get(link.ray_node)) is not None
                ]
                await self.send("stores", used)
            took_seconds = time.monotonic() - asked_at
            await asyncio.sleep(max(STORES_SECONDS, took_seconds / LOOK_SHARE))

    async def _update_links(self, nodes: list[dict[str, Any]]) -> None:
        known = {node["NodeID"] for node in nodes}
        alive = {node["NodeID"]: node for node in nodes if node["Alive"]}
        for name, link in list(self._links.items()):
            if link.ray_node not in alive:
                del self._links[name]
                link.close()
                if link.ray_node in known:
                    await link.report_dead()
                else:  # a control service that was restarted does not know the node
                    await link.report_lost("Ray does not know the node any more")
        linked = {link.ray_node for link in self._links.values()}
        for ray_node, node in sorted(alive.items()):
            if ray_node not in linked and (self._opening.local_node or _takes_runs(node)):
                self._link(ray_node, node)

    def _give_peers(self, nodes: list[dict[str, Any]], turn: int, *, to_all: bool) -> None:
        """Choose the peers that each node tries. Unless `to_all`, only nodes that have none yet get peers."""
        if not to_all and all(link.has_peers for link in self._links.values()):
            return
        about = {node["NodeID"]: node for node in nodes}
        links = sorted(self._links.items())
        circle = [_peer(name, about[link.ray_node]) for name, link in links]
        for index, (_, link) in enumerate(links):
            if to_all or not link.has_peers:
                link.give_peers(peers_of(circle, index, turn))

    def _link(self, ray_node: str, node: dict[str, Any]) -> None:
        local = self._opening.local_node
        name = local or _name_of(node)
        fault = ""
        if "/" in name:  # a slash separates the parts of a device's key
            fault = "a node's name has a slash and it is left out; start it with a --node-name without one"
        elif name in self._links:
            fault = "two nodes have one name; start one with a --node-name of its own"
        if fault:
            if ray_node not in self._left_out:
                self._left_out.add(ray_node)
                log.error(fault, node=name)
            return
        cpus = None if local else float(node["Resources"]["CPU"])
        config = AgentConfig.from_json(self._opening.agent_config).on_node(name, cpus)
        broker, term = self._opening.broker, (self._lineage, self._term)
        self._links[name] = link = NodeLink(ray_node, config, broker, *term, self, self._tasks)
        link.store_bytes = int(node["Resources"].get(_STORE, 0))


def _connect(address: str) -> None:
    """Connect to Ray. Call this in a thread: on the main thread Ray would install its own signal handlers."""
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)


def _request_resources(bundles: list[dict[str, float]]) -> None:
    from ray.autoscaler.sdk import request_resources  # its modules are large, and few clusters have one

    request_resources(bundles=bundles)


def _takes_runs(node: dict[str, Any]) -> bool:
    """Return True if a node has CPUs. The node through which a broker talks to Ray has none (`ray start
    --num-cpus=0`)."""
    return float(node["Resources"].get("CPU", 0.0)) > 0.0


def _peer(name: str, node: dict[str, Any]) -> Peer:
    ports = int(node["NodeManagerPort"]), int(node["ObjectManagerPort"])
    return Peer(name, str(node["NodeManagerAddress"]), ports)


def _name_of(node: dict[str, Any]) -> str:
    """Return the name that the operator gave by `ray start --node-name`, or the host name."""
    named = str(node["NodeName"])
    return str(node["NodeManagerHostname"]) if named == node["NodeManagerAddress"] else named


if __name__ == "__main__":
    main()
