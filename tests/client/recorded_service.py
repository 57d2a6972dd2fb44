"""An HTTP server that sends recorded answers and remembers the requests."""

import json
import threading
from collections import deque
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from msgspec import Struct, field


class Request(Struct, frozen=True):
    method: str
    path: str
    params: list[tuple[str, str]]
    headers: Mapping[str, str]
    body: Any


class Reply(Struct, frozen=True):
    status: int = 200
    body: Any = field(default_factory=dict)
    """Made of the request by a function, if it is one."""
    headers: Mapping[str, str] = field(default_factory=dict)


HANG_UP = Reply(status=0)
"""Close the connection without an answer."""


class RecordedService:
    """Sends the replies of `reply_with` in order. When there are none left, it sends `always`."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.always = Reply(500, {"detail": "no answer was recorded for this"})
        self.always_at: dict[str, Reply] = {}
        """The same, for paths with this end."""
        self._replies: deque[Reply] = deque()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def reply_with(self, *replies: Reply) -> Self:
        self._replies.extend(replies)
        return self

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(service) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - the handler has a self of its own
        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("content-length", 0))
                text = self.rfile.read(length)
                parts = urlsplit(self.path)
                service.requests.append(
                    Request(
                        self.command,
                        parts.path,
                        parse_qsl(parts.query),
                        {name.lower(): value for name, value in self.headers.items()},
                        _read(text, self.headers.get("content-type", "")),
                    )
                )
                at_path = [it for end, it in service.always_at.items() if parts.path.endswith(end)]
                reply = service._replies.popleft() if service._replies else [*at_path, service.always][0]
                if reply is HANG_UP:
                    self.close_connection = True
                    return
                body = reply.body(service.requests[-1]) if callable(reply.body) else reply.body
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(reply.status)
                for name, value in {"Content-Length": str(len(data)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = do_DELETE = answer  # noqa: N815 - http.server says so

            def log_message(self, format: str, *args: Any) -> None:
                return

        return Handler


FULL_ID = "task_01k9z6x8d2000abcdefghjkmnp"


def _read(body: bytes, content_type: str) -> Any:
    if content_type == "application/octet-stream":
        return body
    return json.loads(body) if body else None


def a_task(id: str = "task_1", state: str = "pending", **more: Any) -> dict[str, Any]:
    """A task as the service answers it, as far as a client needs it."""
    return {
        "id": id,
        "name": "",
        "tenant": "default",
        "state": state,
        "priority": 50,
        "band": "batch",
        **more,
    }


def a_problem(status: int, code: str, detail: str = "no", **more: Any) -> Reply:
    return Reply(status, {"status": status, "code": code, "detail": detail, "request_id": "req_7", **more})


def outcome(state: str, **more: Any) -> Reply:
    ended = {"id": FULL_ID, "state": state, "format": "json", "error": None, "log_tail": "", **more}
    return Reply(200, ended)


def page(*ids: str) -> Reply:
    return Reply(200, {"items": [a_task(id) for id in ids], "next_cursor": None, "has_more": False})


def failed(state: str = "failed") -> Reply:
    error = {"kind": "exception", "message": "no luck", "traceback": "Traceback ...\nValueError: no luck"}
    return outcome(state, error=error)
