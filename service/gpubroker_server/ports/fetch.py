"""A request of the service's own to a model server, answered as a whole."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from gpubroker_server.ports.backends import Header, ModelBackend, RequestHead, ResponseHandler, Trouble


class Fetched(NamedTuple):
    status: int
    headers: Sequence[Header]
    body: bytes


class NotFetched(Exception):
    def __init__(self, trouble: Trouble, detail: str) -> None:
        super().__init__(detail)
        self.trouble = trouble


async def fetch(
    backend: ModelBackend,
    head: RequestHead,
    body: bytes = b"",
    within_seconds: float = 10.0,
    *,
    is_check: bool = False,
) -> Fetched:
    """Over a connection as clients' requests use them. `is_check`: it waits for none behind others. Raises
    NotFetched."""
    whole = _WholeResponse()
    request = backend.ask(head._replace(body_bytes=len(body)), whole, is_check=is_check)
    try:
        request.write(body)
        request.end()
        async with asyncio.timeout(within_seconds):
            return await whole.fetched
    except TimeoutError:
        raise NotFetched(Trouble.SILENT, f"nothing came for {within_seconds:g} s") from None
    finally:
        request.cancel()


class _WholeResponse(ResponseHandler):
    def __init__(self) -> None:
        self.fetched: asyncio.Future[Fetched] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._headers: Sequence[Header] = ()
        self._body: list[bytes] = []

    def on_head(self, status: int, headers: Sequence[Header], body_bytes: int | None) -> None:  # noqa: ARG002  # it is counted as it comes
        self._status, self._headers = status, headers

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_end(self) -> None:
        if not self.fetched.done():
            self.fetched.set_result(Fetched(self._status, self._headers, b"".join(self._body)))

    def on_trouble(self, trouble: Trouble, detail: str) -> None:
        if not self.fetched.done():
            self.fetched.set_exception(NotFetched(trouble, detail))
