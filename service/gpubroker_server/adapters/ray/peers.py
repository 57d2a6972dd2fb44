"""Finds out whether the nodes of a cluster reach each other at the ports that Ray uses between them."""

import asyncio
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

CONNECT_SECONDS = 3.0
AT_ONCE = 8
"""The number of other nodes that a node tries in one round. In a large cluster it takes several rounds until
each pair has been tried."""
MAX_KEPT = 8
"""The most unreached peers that are remembered and tried again in each round."""


class Peer(NamedTuple):
    node: str
    host: str
    ports: tuple[int, ...]


def peers_of(circle: Sequence[Peer], at: int, turn: int) -> list[Peer]:
    """Return the peers that the node at index `at` of the circle tries in this turn. Each turn continues
    after the peers of the previous one."""
    others = len(circle) - 1
    steps = range(turn * AT_ONCE, turn * AT_ONCE + min(AT_ONCE, others))
    return [circle[(at + 1 + step % others) % len(circle)] for step in steps]


class PeerPorts:
    """The results of one node's tries to reach other nodes. They are kept in its agent's memory only."""

    def __init__(self) -> None:
        self._unreached: dict[Peer, tuple[str, str]] = {}
        """The address and the fault of each unreached peer, the one that was found longest ago first."""
        self._trying: asyncio.Task[None] | None = None

    @property
    def unreached(self) -> list[tuple[str, str, str]]:
        """The node, the address and the fault of each peer that could not be reached when it was last
        tried."""
        return [(peer.node, *fault) for peer, fault in self._unreached.items()]

    def try_all(self, peers: Iterable[Peer]) -> None:
        """Try these peers, and again those that could not be reached. Does nothing while a round is under
        way."""
        if self._trying is None or self._trying.done():
            to_try = {peer.node: peer for peer in (*self._unreached, *peers)}
            self._trying = asyncio.create_task(self._try_all(list(to_try.values())))

    async def _try_all(self, peers: Sequence[Peer]) -> None:
        faults = await asyncio.gather(*map(_unreached, peers))
        unreached = [(peer, fault) for peer, fault in zip(peers, faults, strict=True) if fault is not None]
        self._unreached = dict(unreached[-MAX_KEPT:])


async def _unreached(peer: Peer) -> tuple[str, str] | None:
    """Return the address and the fault of the first port that cannot be reached; None if all can."""
    for port in peer.ports:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(peer.host, port)
        except TimeoutError:
            fault = f"no answer within {CONNECT_SECONDS:g} s"
        except OSError as refused:
            fault = os.strerror(refused.errno) if refused.errno else str(refused)
        else:
            writer.transport.abort()
            continue
        return f"{peer.host}:{port}", fault
    return None
