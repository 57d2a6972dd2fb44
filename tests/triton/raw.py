"""One request to a port, said byte for byte, and all of the answer."""

import http.client
from collections.abc import Mapping

from msgspec import Struct

from tests.e2e.service_process import ServiceProcess
from tests.patience import PATIENCE_SECONDS
from tests.triton.server import Triton


class Answer(Struct, frozen=True):
    status: int
    headers: list[tuple[str, str]]
    """In their order, without the request's id."""
    body: bytes


class Door:
    """Where Triton's protocol is spoken, on one connection that is kept."""

    def __init__(self, port: int, headers: Mapping[str, str]) -> None:
        self._headers = headers
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        self.connection.putrequest(method, path, skip_accept_encoding=True)
        sent = {**self._headers, **(headers or {})}
        if body is not None or method == "POST":
            sent["Content-Length"] = str(len(body or b""))
        for name, value in sent.items():
            self.connection.putheader(name, value)
        self.connection.endheaders(body)
        answer = self.connection.getresponse()
        headers_seen = [(name, value) for name, value in answer.getheaders() if name != "Request-Id"]
        return Answer(answer.status, headers_seen, answer.read())


def directly(triton: Triton) -> Door:
    return Door(triton.http_port, {})


def through(service: ServiceProcess) -> Door:
    return Door(int(service.url.rpartition(":")[2]), {"Authorization": f"Bearer {service.token}"})
