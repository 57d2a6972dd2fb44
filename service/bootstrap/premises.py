"""What must hold before anything starts: a data directory that can be written, a port that is free."""

import contextlib
import os
import socket
from pathlib import Path

import psutil


class StartRefused(Exception):
    """The service cannot start; the text says why and what to do."""


def prepare_data_dir(data_dir: Path) -> None:
    """Create it with mode 0700 and prove that it can be written. Raises StartRefused."""
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = data_dir / ".writable"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise StartRefused(
            f"cannot write to the data directory {data_dir}: {error.strerror}; "
            "give it to this user, or name another with --data-dir"
        ) from None


def listening_socket(host: str, port: int) -> socket.socket:
    """Bind before anything is started, so that a port in use costs nothing. Raises StartRefused."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        owner = _port_owner(port)
        raise StartRefused(
            f"cannot listen on {host}:{port}: {error.strerror}{owner}; "
            "stop that process, or choose another port with --port (0 takes a free one)"
        ) from None
    return listener


def _port_owner(port: int) -> str:
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN
            if listens and getattr(connection.laddr, "port", None) == port and connection.pid:
                return f" (process {connection.pid}, {psutil.Process(connection.pid).name()})"
    return ""


def write_private(path: Path, text: str) -> None:
    """Replace a 0600 file in one step; nobody sees half of it, and nobody else sees it at all."""
    draft = path.with_name(path.name + ".new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
