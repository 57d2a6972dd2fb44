"""What connections may take from the service before they have sent a valid token."""

import resource
import select
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path

import psutil
import pytest
from gpubroker_server.http.connections import network_of

from tests.bootstrap.refusals import WAITING
from tests.chaos.forked import ForkedService
from tests.e2e.service_process import ServiceProcess, until
from tests.patience import PATIENCE_SECONDS

HEAD_BYTES = 16 * 1024
OF_AN_ADDRESS = 20
IN_ALL = 60
LIMITS = {
    "head_bytes": HEAD_BYTES,
    "head_seconds": 1,
    "connections": IN_ALL,
    "unauthenticated_connections": OF_AN_ADDRESS,
}
NOWHERE = {"servers": [{"name": "main", "http_url": "http://127.0.0.1:1"}]}
"""A data plane in front of the other routes; its server is never asked here."""

MAX_GROWTH_BYTES = 16 * 2**20
EMPTY = b"{}"
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module", params=["without Triton", "with Triton"])
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceProcess]:
    triton = NOWHERE if request.param == "with Triton" else {}
    home = tmp_path_factory.mktemp("connections") / "data"
    with ForkedService(home, **WAITING, limits=LIMITS, triton=triton) as running:
        yield running


class Client:
    """A connection that sends what a test says, and looks for an answer meanwhile."""

    def __init__(self, service: ServiceProcess) -> None:
        host, port = service.url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)), PATIENCE_SECONDS)
        self._token = service.token
        self.sent_bytes = 0

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)
        self.sent_bytes += len(data)

    def ask(self, path: str = "/tasks", more: str = "") -> None:
        """A whole request with a valid token."""
        self.send(self.head(path, more))

    def begin(self) -> None:
        """Send the head of a submit whose body is to come: a connection that waits for the next request would
        be closed after some seconds."""
        more = f"Content-Type: application/json\r\nContent-Length: {len(EMPTY)}\r\n"
        self.send(self.head("/tasks", more, "POST"))

    def finish(self) -> int:
        """Send the body, which lacks what a submit needs; the status of the answer."""
        self.send(EMPTY)
        return self.status()

    def head(self, path: str, more: str = "", method: str = "GET") -> bytes:
        lines = f"Host: localhost\r\nAuthorization: Bearer {self._token}\r\n{more}"
        return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode()

    def send_until_answered(self, pieces: Iterator[bytes]) -> bytes:
        """All that the service answers; it closes the connection."""
        for piece in pieces:
            if select.select([self._socket], [], [], 0)[0]:
                break
            try:
                self.send(piece)
            except ConnectionError:
                break
        return self.rest()

    def status(self) -> int:
        """Of the next answer, which is read to its end."""
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            byte = self._socket.recv(1)
            assert byte, f"closed after {head!r}"
            head += byte
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        while length:
            length -= len(self._socket.recv(length))
        return int(head.split()[1])

    def rest(self) -> bytes:
        """What comes until the service has closed the connection."""
        read = b""
        try:
            while data := self._socket.recv(65536):
                read += data
        except ConnectionError:
            pass
        return read

    def is_open(self) -> bool:
        return not select.select([self._socket], [], [], 0)[0]


def rss_bytes(service: ServiceProcess) -> int:
    found: int = psutil.Process(service.pid).memory_info().rss
    return found


def codes(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


ENDLESS = {
    "a header of 25 MB": (b"X: ", repeat(b"x" * 65536, 400)),
    "three million headers": (b"", repeat(b"a: b\r\n" * 10_000, 300)),
    "a name of 25 MB": (b"", repeat(b"x" * 65536, 400)),
    "continued for ever": (b"X: y", repeat(b"\r\n z" * 16_384, 400)),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_a_head_without_end_is_refused_and_not_kept(service: ServiceProcess, what: str) -> None:
    first, pieces = ENDLESS[what]
    before = rss_bytes(service)
    with Client(service) as client:
        answer = client.send_until_answered(chain([HEALTH + first], pieces))
        assert codes(answer) in ([431], [400]), answer
        assert client.sent_bytes < 8 * 2**20
    assert rss_bytes(service) - before < MAX_GROWTH_BYTES


def test_a_path_without_end_is_refused(service: ServiceProcess) -> None:
    with Client(service) as client:
        assert codes(client.send_until_answered(chain([b"GET /"], repeat(b"x" * 65536, 400)))) == [431]


def test_blank_lines_without_end_are_no_request(service: ServiceProcess) -> None:
    with Client(service) as client:
        client.send(HEALTH + b"\r\n")
        assert client.status() == 200
        began = time.monotonic()
        while client.is_open() and time.monotonic() - began < PATIENCE_SECONDS:
            client.send(b"\r\n")
            time.sleep(0.1)  # the pace of a client that only wants to stay
        assert not client.is_open()


def test_largest_allowed_head_is_answered_and_one_byte_more_is_not(
    service: ServiceProcess,
) -> None:
    for more, status in ((0, 200), (1, 431)):
        with Client(service) as client:
            start = client.head("/healthz")[:-2] + b"X: "
            head = start + b"x" * (HEAD_BYTES - len(start) - 4 + more) + b"\r\n\r\n"
            assert len(head) == HEAD_BYTES + more
            client.send(head)
            assert client.status() == status


def test_a_head_has_a_limit_of_headers(service: ServiceProcess) -> None:
    for count, status in ((100, 200), (200, 431)):
        with Client(service) as client:
            client.ask("/healthz", "a: b\r\n" * count)
            assert client.status() == status


def test_trailers_and_extensions_of_chunks_without_end_are_not_kept(service: ServiceProcess) -> None:
    for start in (b"0\r\nX: ", b"5;x="):
        before = rss_bytes(service)
        with Client(service) as client:
            client.send(client.head("/tasks", "Transfer-Encoding: chunked\r\n", "POST"))
            client.send_until_answered(chain([start], repeat(b"x" * 65536, 400)))
            assert client.sent_bytes < 8 * 2**20
        assert rss_bytes(service) - before < MAX_GROWTH_BYTES


def test_trailers_are_read_and_dropped(service: ServiceProcess) -> None:
    with Client(service) as client:
        client.send(client.head("/tasks/batch", "Transfer-Encoding: chunked\r\n", "POST"))
        client.send(b"2\r\n{}\r\n0\r\n" + b"Authorization: none\r\n" * 50 + b"\r\n")
        assert client.status() == 422
        client.ask()
        assert client.status() == 200


def test_a_connection_that_says_nothing_is_closed(service: ServiceProcess) -> None:
    with Client(service) as client:
        began = time.monotonic()
        assert client.rest() == b""
        assert time.monotonic() - began >= LIMITS["head_seconds"] / 2


@pytest.mark.parametrize("has_token", [False, True])
def test_a_head_that_comes_slowly_is_refused(service: ServiceProcess, has_token: bool) -> None:
    with Client(service) as client:
        if has_token:
            client.ask()
            assert client.status() == 200
        client.send(HEALTH)
        began = time.monotonic()
        while client.is_open() and time.monotonic() - began < PATIENCE_SECONDS:
            client.send(b"X: y\r\n")
            time.sleep(0.1)  # slow is what it must be
        assert codes(client.rest()) == [408]


def test_a_body_that_comes_slowly_needs_a_token(service: ServiceProcess) -> None:
    slow = b"POST /tasks HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
    with Client(service) as stranger, Client(service) as client:
        stranger.send(slow)
        client.send(client.head("/tasks/batch", "Content-Length: 2\r\n", "POST"))
        assert codes(stranger.rest()) == [401]
        time.sleep(LIMITS["head_seconds"])  # longer than a head may take
        client.send(b"{}")
        assert client.status() == 422


def test_requests_are_pipelined_only_after_a_valid_token(service: ServiceProcess) -> None:
    many = (HEALTH + b"\r\n") * 1000
    with Client(service) as client:
        assert codes(client.send_until_answered(repeat(many, 100))) == [200]
    with Client(service) as client:
        client.ask()
        assert client.status() == 200
        client.send(many)
        assert [client.status() for _ in range(1000)] == [200] * 1000


def idle(service: ServiceProcess, count: int) -> Sequence[Client]:
    return [Client(service) for _ in range(count)]


def test_connections_without_a_token_make_room_for_newer_ones(
    service: ServiceProcess,
) -> None:
    """The newer ones come from the same address."""
    with Client(service) as mine:
        mine.ask()
        assert mine.status() == 200
        mine.begin()
        strangers = idle(service, OF_AN_ADDRESS + 30)
        until(lambda: not any(one.is_open() for one in strangers[:30]), "the oldest are closed")
        assert mine.finish() == 422
        with Client(service) as another:
            another.ask()
            assert another.status() == 200
        for one in strangers:
            one.__exit__()


def test_all_connections_together_have_a_limit(service: ServiceProcess) -> None:
    clients = []
    for _ in range(IN_ALL):
        clients.append(Client(service))
        clients[-1].ask()
        assert clients[-1].status() == 200
        clients[-1].begin()
    with Client(service) as refused:
        assert codes(refused.rest()) == [503]
    clients.pop().__exit__()
    with Client(service) as stranger:
        stranger.send(HEALTH + b"\r\n")
        assert stranger.status() == 200
        with Client(service) as another:
            assert stranger.rest() == b""
            another.ask()
            assert another.status() == 200
    for one in clients:
        assert one.finish() == 422
        one.__exit__()


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("", ""),
    ],
)
def test_an_address_of_ipv6_counts_with_its_network(host: str, network: str) -> None:
    assert network_of(host) == network


@contextmanager
def ending(service: ServiceProcess) -> Iterator[None]:
    try:
        yield
    finally:
        service.stop()


def with_few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1500))


def test_a_low_limit_of_open_files_is_raised_to_what_the_connections_need(tmp_path: Path) -> None:
    service = ForkedService(tmp_path / "data", **WAITING, limits={"connections": 400})
    with ending(service.start(with_few_files)):
        assert psutil.Process(service.pid).rlimit(resource.RLIMIT_NOFILE) == (1424, 1500)
        assert "too few open files" not in service.log()
    service = ForkedService(tmp_path / "other", **WAITING, limits={"connections": 1000})
    with ending(service.start(with_few_files)):
        assert psutil.Process(service.pid).rlimit(resource.RLIMIT_NOFILE) == (1500, 1500)
        assert "too few open files are allowed" in service.log()
