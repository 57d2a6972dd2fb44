"""The process of a model server on this machine. Triton doesn't say when it was started; the operating system
does, for processes of this machine and user."""

import os
import socket
from pathlib import Path
from typing import Final

import psutil

_LOOPBACK: Final = ("127.", "::1")
_LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_START_TIME: Final = 19
"""The index of the start time in /proc/PID/stat, counted after the name of the process, because the name may
contain any characters."""


class ListeningProcess:
    """The process that listens at a server's address."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._host = host.strip("[]").lower()
        self._port = int(port)
        self._found = ""

    @property
    def address(self) -> str:
        """The address of the server. All names of loopback give one address."""
        return f"{'localhost' if self._host in _LOCAL_NAMES else self._host}:{self._port}"

    def incarnation(self) -> str:
        """Return a text that differs after each start of the server; empty if its process cannot be seen."""
        if not self._found or is_gone(self._found):
            pid = self._find()
            self._found = "" if pid is None else _text_of(pid)
        return self._found

    def _find(self) -> int | None:
        try:
            addresses = {info[4][0] for info in socket.getaddrinfo(self._host, self._port)}
            if not all(str(address).startswith(_LOOPBACK) for address in addresses):
                return None
            for connection in psutil.net_connections("tcp"):
                listens = connection.status == psutil.CONN_LISTEN
                if listens and getattr(connection.laddr, "port", None) == self._port and connection.pid:
                    return int(connection.pid)
        except (OSError, psutil.Error):
            return None
        return None


def is_gone(process: str) -> bool:
    """Return True if the process has ended. A process of another machine, or of another pid namespace,
    cannot be seen here and counts as alive."""
    machine, _, pid_and_start = process.rpartition("/")
    pid, _, started = pid_and_start.partition("@")
    try:
        return machine == _machine() and _start_time(int(pid)) != started
    except (OSError, ValueError):
        return False


def _text_of(pid: int) -> str:
    try:
        return f"{_machine()}/{pid}@{_start_time(pid)}"
    except OSError:
        return ""


def _machine() -> str:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot_id}/{os.readlink('/proc/self/ns/pid')}"


def _start_time(pid: int) -> str:
    """Return the start time of a process in ticks since boot, which does not depend on the wall clock; empty
    if there is no such process. Raises OSError if the process cannot be seen."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return stat.rpartition(")")[2].split()[_START_TIME]
