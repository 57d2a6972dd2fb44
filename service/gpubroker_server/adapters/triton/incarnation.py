"""Whether a server is the one that it was: Triton does not say when it was started, but the process that
listens on this machine does."""

import socket
from typing import Final

import psutil

_LOOPBACK: Final = ("127.", "::1")


class Incarnations:
    """Of one server, by its address."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._host = host.strip("[]")
        self._port = int(port)
        self._process: psutil.Process | None = None

    def current(self) -> str:
        """Another one after each start; empty for other machines and other users' processes."""
        if self._process is None or not self._process.is_running():
            self._process = self._listening()
        if self._process is None:
            return ""
        return f"{self._process.pid}:{self._process.create_time():.2f}"

    def _listening(self) -> psutil.Process | None:
        try:
            addresses = {found[4][0] for found in socket.getaddrinfo(self._host, self._port)}
            if not all(str(address).startswith(_LOOPBACK) for address in addresses):
                return None
            for connection in psutil.net_connections("tcp"):
                listens = connection.status == psutil.CONN_LISTEN
                if listens and getattr(connection.laddr, "port", None) == self._port and connection.pid:
                    return psutil.Process(connection.pid)
        except (OSError, psutil.Error):
            return None
        return None
