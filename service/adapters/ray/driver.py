"""The Ray driver: an expendable process that talks to Ray, so that nothing Ray does ends the service.

Started as `python -m service.adapters.ray.driver DESCRIPTOR`. It reads frames of orders from the service and
writes frames of reports, both unopened. When the service is gone it ends; the runs go on.
"""

import asyncio
import logging
import os
import socket
import sys
from typing import Any, NamedTuple

import ray

from service.adapters.ray.frames import frame, read_frame
from service.adapters.ray.node_link import NodeLink
from service.adapters.ray.options import AgentConfig

log = logging.getLogger("gpubroker.driver")

CONNECT_SECONDS = 60.0
"""Ray itself tries for minutes."""

LOOK_SECONDS = 1.0
"""How often Ray is asked which nodes there are; it takes half a millisecond."""


class Opening(NamedTuple):
    """The first frame: what to connect to, and as whom."""

    address: str
    local_node: str
    """Name of the only node of a local head; empty for a joined cluster."""
    agent_config: str
    broker: str
    term: int


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(_drive(socket.socket(fileno=int(sys.argv[1]))))
    # Without Ray's own farewell, which may wait for a control service that is gone.
    os._exit(0)


async def _drive(channel: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=channel)
    opening = await read_frame(reader)
    if opening is None:
        return
    driver = Driver(Opening(*opening), writer)
    looking = asyncio.create_task(driver.look_after_nodes())
    while (message := await read_frame(reader)) is not None:
        await driver.on_message(message)
    looking.cancel()


class Driver:
    def __init__(self, opening: Opening, writer: asyncio.StreamWriter) -> None:
        self._opening = opening
        self._writer = writer
        self._term = opening.term
        self._links: dict[str, NodeLink] = {}
        """By node name."""

    async def look_after_nodes(self) -> None:
        """Connect, then keep one link per node that is alive."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await asyncio.to_thread(_connect, self._opening.address)
        except Exception as fault:
            log.exception("cannot connect to Ray at %s", self._opening.address)
            await self.tell("trouble", f"cannot connect to Ray at {self._opening.address}: {fault!r}")
            os._exit(1)
        await self.tell("connected")
        while True:
            await self._follow(await asyncio.to_thread(ray.nodes))
            await asyncio.sleep(LOOK_SECONDS)

    async def on_message(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("orders", node, packed):
                if (link := self._links.get(node)) is not None:
                    link.send(packed)
            case ("term", term):
                self._term = term
                for link in self._links.values():
                    link.announce_again(term)
            case ("leave",):
                await asyncio.gather(*(link.dismiss() for link in self._links.values()))
                await self.tell("left")

    async def tell(self, *parts: Any) -> None:
        self._writer.write(frame(*parts))
        await self._writer.drain()

    async def _follow(self, nodes: list[dict[str, Any]]) -> None:
        alive = {node["NodeID"]: node for node in nodes if node["Alive"]}
        for name, link in list(self._links.items()):
            if link.ray_node not in alive:
                del self._links[name]
                link.close()
                await link.tell_lost("Ray says that the node is dead")
        linked = {link.ray_node for link in self._links.values()}
        for ray_node, node in sorted(alive.items()):
            if ray_node not in linked:
                self._link(ray_node, self._opening.local_node or _name_of(node))

    def _link(self, ray_node: str, name: str) -> None:
        if name in self._links:
            log.error("two nodes are called %s; start one with a --node-name of its own", name)
            return
        config = AgentConfig.from_json(self._opening.agent_config)
        self._links[name] = NodeLink(ray_node, config.on_node(name), self._opening.broker, self._term, self)


def _connect(address: str) -> None:
    """In a thread: on the main thread Ray would put its own signal handlers in place."""
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)


def _name_of(node: dict[str, Any]) -> str:
    """What the operator called it by `ray start --node-name`, or its host name."""
    named = str(node["NodeName"])
    return str(node["NodeManagerHostname"]) if named == node["NodeManagerAddress"] else named


if __name__ == "__main__":
    main()
