"""What proxies in front of the service say of a client: believed of those that the operator trusts."""

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network

FORWARDED_FOR = b"x-forwarded-for"
MOST_HOPS = 20


class TrustedProxies:
    def __init__(self, networks: Iterable[str] = ()) -> None:
        """`networks`: addresses, or networks such as 10.0.0.0/8."""
        self._networks = tuple(ip_network(given, strict=False) for given in networks)
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
