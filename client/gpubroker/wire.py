"""The seam to httpx: a Call as a request, a response as an Answer, a broken connection as Unreachable."""

from typing import Any

import httpx

from gpubroker.connection import Connection
from gpubroker.errors import BrokerError, Unreachable
from gpubroker.exchange import Answer, Call

_CONNECT_SECONDS = 5.0
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def client_settings(connection: Connection) -> dict[str, Any]:
    headers = {"Accept": "application/json", "User-Agent": "gpubroker-python"}
    if connection.token is not None:
        headers["Authorization"] = f"Bearer {connection.token}"
    url = httpx.URL(connection.url)
    return {
        "base_url": connection.url,
        "headers": headers,
        # A proxy named in the environment cannot reach a service on this machine's own loopback address.
        "trust_env": url.host not in _LOOPBACK,
        # To read whom to trust takes 25 ms, and where nothing is encrypted nobody is asked.
        "verify": url.scheme == "https",
    }


def request_of(call: Call, timeout_seconds: float) -> dict[str, Any]:
    headers = dict(call.headers)
    if call.body is not None:
        headers.setdefault("Content-Type", "application/json")
    return {
        "method": call.method,
        "url": call.path,
        "params": call.params or None,
        "content": call.body,
        "headers": headers,
        "timeout": httpx.Timeout(timeout_seconds + call.patience_seconds, connect=_CONNECT_SECONDS),
    }


def answer_of(response: httpx.Response) -> Answer:
    return Answer(
        response.status_code,
        {name.lower(): text for name, text in response.headers.items()},
        response.content,
    )


def unreachable(connection: Connection, error: httpx.TransportError) -> Unreachable:
    what = str(error) or type(error).__name__
    return Unreachable(
        f"no answer from {connection.url} ({connection.source}): {what}; is the service running? "
        "`gpubroker serve` starts one here",
        code="unreachable",
    )


def closed() -> BrokerError:
    return BrokerError("this Broker is closed, and asks nothing any more; make another one", code="closed")
