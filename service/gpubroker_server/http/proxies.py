"""Reads the headers in which proxies in front of the service name the client. Only headers from proxies that
the operator trusts are believed."""

import re
from collections.abc import Iterable
from contextvars import ContextVar
from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network

FORWARDED_FOR, FORWARDED_PREFIX = b"x-forwarded-for", b"x-forwarded-prefix"
MOST_HOPS = 20
PREFIX = re.compile(r"(?:/[A-Za-z0-9._~-]+){1,20}")
"""The path below which a proxy has the service, and which it takes off before it passes a request on."""

current_prefix: ContextVar[str] = ContextVar("current_prefix", default="")
"""The prefix of the request that is being answered: addresses in answers begin with it."""


class TrustedProxies:
    def __init__(self, networks: Iterable[str] = (), root_path: str = "") -> None:
        """`networks`: addresses, or networks such as 10.0.0.0/8. `root_path`: the prefix of requests of
        which no trusted proxy says another one."""
        self._root_path = root_path
        self._networks = tuple(ip_network(given, strict=False) for given in networks)
        self.may_be_below_a_path = bool(root_path or self._networks)
        self.trusts = lru_cache(1024)(self._trusts)

    def client_of(self, peer: str, forwarded: Iterable[bytes]) -> str:
        """Return the address of the client of a request: the last one in X-Forwarded-For that no trusted
        proxy has, if the connection comes from a trusted proxy; otherwise that of the connection."""
        if not self.trusts(peer):
            return peer
        hops = b",".join(forwarded).decode("latin-1").split(",")[-MOST_HOPS:]
        client = peer
        for hop in reversed(hops):
            address = _without_port(hop.strip())
            if not address:
                break  # what is before it may be anything
            client = address
            if not self.trusts(address):
                break
        return client

    def prefix_of(self, peer: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Return the prefix of a request, without a slash at its end."""
        if not self.trusts(peer):
            return self._root_path
        said = next((value for name, value in headers if name == FORWARDED_PREFIX), b"")
        text = said.decode("latin-1").strip().rstrip("/")
        return text if PREFIX.fullmatch(text) else self._root_path

    def _trusts(self, peer: str) -> bool:
        try:
            address = ip_address(peer)
        except ValueError:
            return False
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)


def _without_port(hop: str) -> str:
    """Return the address of one hop, as some proxies write it with a port; empty if it is none."""
    if hop.startswith("["):
        hop = hop[1:].partition("]")[0]
    elif hop.count(":") == 1:
        hop = hop.partition(":")[0]
    try:
        return str(ip_address(hop))
    except ValueError:
        return ""
