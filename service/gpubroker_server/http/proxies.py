"""Reads the headers in which proxies in front of the service name the client. Headers are read only from
proxies that the operator trusts."""

import re
from collections.abc import Iterable
from contextvars import ContextVar
from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network

FORWARDED_FOR, FORWARDED_PREFIX = b"x-forwarded-for", b"x-forwarded-prefix"
MAX_HOPS = 20
PREFIX = re.compile(r"(?:/[A-Za-z0-9._~-]+){1,20}")
"""The pattern of the path under which a proxy publishes the service. The proxy removes this path from a
request before it passes the request on."""

current_prefix: ContextVar[str] = ContextVar("current_prefix", default="")
"""The path prefix of the request that is being answered. Paths in the answer begin with it."""


class TrustedProxies:
    def __init__(self, networks: Iterable[str] = (), root_path: str = "") -> None:
        """`networks` lists the trusted addresses and networks, such as 10.0.0.0/8. `root_path` is the prefix
        of requests for which no trusted proxy names another one."""
        self._root_path = root_path
        self._networks = tuple(ip_network(given, strict=False) for given in networks)
        self.may_be_below_a_path = bool(root_path or self._networks)
        self.trusts = lru_cache(1024)(self._trusts)

    def client_of(self, peer: str, forwarded: Iterable[bytes]) -> str:
        """Return the address of the client of a request. This is `peer`, the other end of the connection,
        unless that is a trusted proxy: then it is the last address in X-Forwarded-For that is not a trusted
        proxy."""
        if not self.trusts(peer):
            return peer
        hops = b",".join(forwarded).decode("latin-1").split(",")[-MAX_HOPS:]
        client = peer
        for hop in reversed(hops):
            address = _without_port(hop.strip())
            if not address:
                break  # The entries before an invalid one may be forged.
            client = address
            if not self.trusts(address):
                break
        return client

    def prefix_of(self, peer: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Return the prefix of a request, without a slash at its end."""
        if not self.trusts(peer):
            return self._root_path
        header = next((value for name, value in headers if name == FORWARDED_PREFIX), b"")
        prefix = header.decode("latin-1").strip().rstrip("/")
        return prefix if PREFIX.fullmatch(prefix) else self._root_path

    def _trusts(self, peer: str) -> bool:
        try:
            address = ip_address(peer)
        except ValueError:
            return False
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)


def _without_port(hop: str) -> str:
    """Return the address of one hop without the port that some proxies add; empty if it is not an address."""
    if hop.startswith("["):
        hop = hop[1:].partition("]")[0]
    elif hop.count(":") == 1:
        hop = hop.partition(":")[0]
    try:
        return str(ip_address(hop))
    except ValueError:
        return ""
