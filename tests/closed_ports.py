"""Ports that refuse connections as long as a test needs that."""

import socket


def a_closed_port() -> socket.socket:
    """Return a socket that is bound to a port of the loopback interface and does not listen.

    A port that is only free may be taken by a service of another test, which then answers.
    """
    found = socket.socket()
    found.bind(("127.0.0.1", 0))
    return found
