"""Finds the Ray node that somebody started on this machine, without importing Ray."""

import os
import socket
from pathlib import Path

ANSWER_SECONDS = 5.0


def raylet_socket() -> Path:
    """Return the socket of the newest Ray node of this machine, in the directory that `ray start` uses by
    default."""
    place = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # noqa: S108  # as Ray does
    return Path(place, "ray", "session_latest", "sockets", "raylet")


def raylet_fault() -> str:
    """Return the reason why the raylet accepts no connection; empty if it does. A raylet ends when it has
    lost its head."""
    try:
        with socket.socket(socket.AF_UNIX) as asked:
            asked.settimeout(ANSWER_SECONDS)
            asked.connect(str(raylet_socket()))
    except OSError as fault:
        return fault.strerror or str(fault)
    return ""
