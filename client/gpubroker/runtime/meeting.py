"""Where the ranks of a task meet: a port of this node that nobody else is given meanwhile."""

import os
import socket


class MeetingPort:
    """Kept from others until this rank's own code may listen on it."""

    def __init__(self, host: str) -> None:
        """`host` is where other nodes reach this one. Raises OSError if there is no free port."""
        self._host = f"[{host}]" if ":" in host else host
        # Bound and not listening: no other process is given the port, and nothing can connect to it.
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.bind(("", 0))

    @property
    def address(self) -> str:
        return f"{self._host}:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        """Leave it to whoever listens there next."""
        self._socket.close()


def announce_meeting_place(address: str) -> None:
    """Tell it to libraries for distributed work, and to every process that this one starts."""
    host, _, port = address.rpartition(":")
    os.environ["MASTER_ADDR"] = host.strip("[]")
    os.environ["MASTER_PORT"] = port
