"""The process behind a model server's address: seen by its machine alone, and gone only when it is."""

import subprocess
import sys

import pytest
from gpubroker_server.adapters.triton.server_process import ListeningProcess, is_gone

from tests.patience import PATIENCE_SECONDS
from tests.triton.server import free_ports

_LISTEN = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))):
    print("listening", flush=True)
    sys.stdin.read()
"""


def test_a_process_is_known_while_it_lives_and_gone_when_it_has_ended() -> None:
    [port] = free_ports(1)
    found = ListeningProcess(f"localhost:{port}")
    assert found.incarnation() == ""
    texts = []
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", _LISTEN, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"listening\n"
            texts.append(found.incarnation())
            assert f"/{server.pid}@" in texts[-1]
            assert ListeningProcess(f"127.0.0.1:{port}").incarnation() == found.incarnation() == texts[-1]
            assert not is_gone(texts[-1])
            server.communicate(timeout=PATIENCE_SECONDS)
        assert is_gone(texts[-1])
    assert texts[0] != texts[1]


def test_a_number_that_another_process_has_now_is_not_that_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        [port] = free_ports(1)
        with subprocess.Popen(
            [sys.executable, "-c", _LISTEN, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"listening\n"
            text = ListeningProcess(f"localhost:{port}").incarnation()
            server.communicate(timeout=PATIENCE_SECONDS)
        machine, _, started = text.partition(f"/{server.pid}@")
        assert is_gone(f"{machine}/{other.pid}@{started}x")
        other.communicate(b"\n", timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("text", ["", "nonsense", "another-boot/pid:[1]/1@2", "/@"])
def test_nothing_is_concluded_about_what_cannot_be_seen_here(text: str) -> None:
    assert not is_gone(text)


def test_one_server_has_one_address_however_its_machine_is_named() -> None:
    addresses = {ListeningProcess(f"{host}:8001").address for host in ("localhost", "127.0.0.1", "[::1]")}
    assert addresses == {"localhost:8001"}
    assert ListeningProcess("Triton.example:8001").address == "triton.example:8001"
