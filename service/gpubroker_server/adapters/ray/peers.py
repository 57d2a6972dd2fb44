"""Finds out if the nodes of a cluster reach each other at the ports that Ray uses between them."""

import asyncio
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

CONNECT_SECONDS = 3.0
AT_ONCE = 8
"""The number of other nodes that a node tries in one round. In a large cluster each pair has its turn in the
end."""
MOST_KEPT = 8
"""The most peers that could not be reached and are tried again each time."""


class Peer(NamedTuple):
    node: str
    host: str
    ports: tuple[int, ...]


def peers_of(circle: Sequence[Peer], at: int, turn: int) -> list[Peer]:
    """Return the next nodes after this one in the circle; each turn continues where the last one ended."""
    others = len(circle) - 1
    steps = range(turn * AT_ONCE, turn * AT_ONCE + min(AT_ONCE, others))
    return [circle[(at + 1 + step % others) % len(circle)] for step in steps]


class PeerPorts:
    """The ports of other nodes as one node sees them. They are kept in its agent's memory only."""

    def __init__(self) -> None:
        self._unreached: dict[Peer, tuple[str, str]] = {}
        """Address and fault; the one that was found longest ago comes first."""
        self._trying: asyncio.Task[None] | None = None

    @property
    def unreached(self) -> list[tuple[str, str, str]]:
        """(node, address, fault) of each that could not be reached when it was last tried."""
        return [(peer.node, *found) for peer, found in self._unreached.items()]

    def try_all(self, peers: Iterable[Peer]) -> None:
        """Try these peers, and once more those that could not be reached, unless a round is under way."""
        if self._trying is None or self._trying.done():
            to_try = {peer.node: peer for peer in (*self._unreached, *peers)}
            self._trying = asyncio.create_task(self._try_all(list(to_try.values())))

    async def _try_all(self, peers: Sequence[Peer]) -> None:
        found = await asyncio.gather(*map(_unreached, peers))
        kept = [(peer, fault) for peer, fault in zip(peers, found, strict=True) if fault is not None]
        self._unreached = dict(kept[-MOST_KEPT:])


async def _unreached(peer: Peer) -> tuple[str, str] | None:
    """Return the address and the fault of the first port that cannot be reached."""
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
