"""A connection that fails says what is wrong with it: token, certificate, scheme or address."""

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from gpubroker import AsyncBroker, Broker, Unreachable
from gpubroker.transport.connection import find_service

from tests.authority import Authority
from tests.client.command_line import Run

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"

NGINX = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/html\r\nContent-Length: 51\r\n\r\n"
    b"The plain HTTP request was sent to HTTPS port <hr/>"
)


class Tls(NamedTuple):
    port: int
    ca: Path


def _read_request(connection: socket.socket) -> None:
    """Read what comes first, and the body that a request announces: closing a connection with unread bytes
    resets it, and the client loses the answer."""
    head, _, body = connection.recv(10_000).lower().partition(b"\r\n\r\n")
    announced = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
    while len(body) < announced and (more := connection.recv(10_000)):
        body += more


@contextlib.contextmanager
def answering(answer: bytes, begin: Callable[[socket.socket], socket.socket]) -> Iterator[int]:
    """A server that gives one answer to every connection; `begin` may wrap it."""

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                taken, _ = listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), begin(taken) as connection:
                _read_request(connection)
                connection.sendall(answer)

    with socket.create_server(("0.0.0.0", 0)) as listener:
        served = threading.Thread(target=serve, args=(listener,))
        served.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            served.join()


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[Tls]:
    authority = Authority(tmp_path / "ca")
    certificate, key = authority.signed("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with answering(OK, lambda taken: context.wrap_socket(taken, server_side=True)) as port:
        yield Tls(port, authority.root)


@pytest.fixture
def plain() -> Iterator[int]:
    with answering(OK, lambda taken: taken) as port:
        yield port


def fault_at(url: str) -> Unreachable:
    """Of the SDK for threads, at once: retries would take 30 s."""
    began = time.monotonic()
    with Broker(url, "token") as broker, pytest.raises(Unreachable) as raised:
        broker.cancel("task_1")
    assert time.monotonic() - began < 10, "it was tried again"
    return raised.value


def test_a_certificate_that_is_not_trusted_says_so_and_names_the_variable(tls: Tls) -> None:
    fault = fault_at(f"https://localhost:{tls.port}")
    assert fault.code == "untrusted-certificate"
    assert f"the certificate of https://localhost:{tls.port} (given) is not trusted" in str(fault)
    assert "SSL_CERT_FILE" in str(fault)


def test_the_file_of_the_variable_is_trusted_for_localhost_too(
    tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tls.ca))
    with Broker(f"https://localhost:{tls.port}", "token", retry_seconds=0) as broker:
        broker.shutdown()  # answered over TLS
    fault = fault_at(f"https://127.0.0.2:{tls.port}")
    assert "is for another name" in str(fault)


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_file_of_certificates_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    with pytest.raises(Unreachable, match=r"SSL_CERT_FILE names '.*ca\.pem', which cannot be used"):
        Broker("https://localhost:1", "token")


def test_wrong_scheme_names_the_other_one_with_tls_and_without(tls: Tls, plain: int) -> None:
    assert "does not speak TLS; write http://" in str(fault_at(f"https://127.0.0.1:{plain}"))
    fault = fault_at(f"http://127.0.0.1:{tls.port}")
    assert (fault.code, "speaks TLS; write https://" in str(fault)) == ("wrong-scheme", True)


def test_the_sdk_for_asyncio_says_the_same(tls: Tls) -> None:
    async def ask() -> None:
        async with AsyncBroker(f"http://127.0.0.1:{tls.port}", "token") as broker:
            await broker.cancel("task_1")

    with pytest.raises(Unreachable, match="speaks TLS; write https://"):
        asyncio.run(ask())


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (NGINX, "speaks TLS; write https://"),
        (
            b"HTTP/1.1 308 Permanent Redirect\r\nLocation: https://gpus.lab/\r\nContent-Length: 0\r\n\r\n",
            "sends clients on to https://gpus.lab/; use that address",
        ),
    ],
)
def test_what_a_proxy_says_about_the_scheme_is_told(answer: bytes, says: str) -> None:
    with answering(answer, lambda taken: taken) as port:
        assert says in str(fault_at(f"http://127.0.0.1:{port}"))


@pytest.mark.parametrize("empty", ["", "  \n"])
def test_an_empty_token_is_named_unless_the_file_has_one(tmp_path: Path, empty: str) -> None:
    environ = {"GPUBROKER_DATA_DIR": str(tmp_path), "GPUBROKER_URL": "http://h:1", "GPUBROKER_TOKEN": empty}
    with pytest.raises(Unreachable, match="GPUBROKER_TOKEN is empty: set it to a token") as raised:
        find_service(environ=environ)
    assert raised.value.code == "no-token"
    with pytest.raises(Unreachable, match="the token that was given is empty"):
        find_service("http://h:1", empty, environ={"GPUBROKER_DATA_DIR": str(tmp_path)})
    (tmp_path / "client.json").write_text('{"url": "http://h:1", "token": "from-file"}')
    assert find_service(environ=environ).token == "from-file"


def test_blanks_around_a_token_are_left_out_and_others_are_refused(tmp_path: Path) -> None:
    environ = {"GPUBROKER_DATA_DIR": str(tmp_path)}
    assert find_service("http://h:1", " gpb_x\n", environ=environ).token == "gpb_x"
    for wrong in ("gpb x", "gpb_ä", "a\nb"):
        with pytest.raises(Unreachable, match="the token that was given is not a token"):
            find_service("http://h:1", wrong, environ=environ)


def test_the_command_line_says_what_is_wrong_with_the_connection(
    run: Run, plain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUBROKER_URL", f"https://127.0.0.1:{plain}")
    ended = run("ps")
    assert (ended.code, "does not speak TLS; write http://" in ended.err) == (7, True)
    monkeypatch.setenv("GPUBROKER_URL", f"http://127.0.0.1:{plain}")
    monkeypatch.setenv("GPUBROKER_TOKEN", "")
    ended = run("ps")
    assert (ended.code, "GPUBROKER_TOKEN is empty" in ended.err) == (7, True)
