"""What every request passes before a route sees it: host, encoding, size, token; and how it leaves."""

import time

import structlog
from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from gpubroker_server.gateway.http.access import Callers
from gpubroker_server.gateway.http.problems import Problem, problem_response
from gpubroker_server.gateway.http.routing import DirectRoute
from gpubroker_server.gateway.parts import GatewayParts
from gpubroker_server.ports.store import Outgrown, StoreUnavailable, Unstorable
from gpubroker_server.telemetry.metrics import Telemetry

log = structlog.get_logger("gpubroker.gateway")

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/openapi.json"})
"""Answered without a token. Everything else, known or not, asks for one."""

_MOST_BYTES = {"/tasks/batch": "batch_body_bytes", "/objects": "object_bytes"}
"""Paths whose bodies may be larger, and the limit that holds for them."""

_NO_ROUTE = "unmatched"
_STORE_AWAY = Problem(
    "store-unavailable",
    "the database or the disk for large objects cannot be reached and nothing was changed; "
    "send the request again",
)


class Door:
    """Pure ASGI, outermost. Whatever is raised inside is answered with a problem; no trace ever leaves."""

    def __init__(
        self,
        router: APIRouter,
        *,
        parts: GatewayParts,
        telemetry: Telemetry,
    ) -> None:
        self._router = router
        self._fixed = {
            (method, route.path): route
            for route in reversed(router.routes)
            if isinstance(route, DirectRoute) and not route.param_convertors
            for method in route.methods or ()
        }
        """Routes whose path has no parameters: found at once, not by trying pattern after pattern."""
        self._parts = parts
        self._callers = Callers(parts.identity, parts.allowed_hosts)
        self._ids = parts.ids
        self._limits = parts.limits
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._router(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the server, which knows better, sends the head alone
        request_id = self._ids.exchange()
        state = scope["state"] = {"parts": self._parts, "request_id": request_id}
        status = 0

        async def leave(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"request-id", request_id.encode())]
            await send(message)

        path = scope["path"]
        if path.endswith("/") and path != "/":
            scope["path"] = path.rstrip("/") or "/"
        headers = state["headers"] = dict(scope["headers"])
        try:
            self._callers.check_host(headers.get(b"host", b""))
            is_open = scope["path"] in OPEN_PATHS
            state["identity"] = None if is_open else self._callers.identify(headers.get(b"authorization"))
            receive = self._limited(scope["path"], headers, receive)
            route = self._fixed.get((scope["method"], scope["path"]))
            if route is None:
                await self._router(scope, receive, leave)
            else:
                scope["route"] = route
                await route.answer(scope, receive, leave)
        except Problem as problem:
            await problem_response(problem, scope)(scope, receive, leave)
        except HTTPException:
            await problem_response(self._no_route(scope), scope)(scope, receive, leave)
        except Outgrown as fault:
            await problem_response(Problem("follower-stale", str(fault)), scope)(scope, receive, leave)
        except StoreUnavailable as fault:
            log.warning("database not reached", request=request_id, fault=str(fault))
            await problem_response(_STORE_AWAY, scope)(scope, receive, leave)
        except Unstorable as fault:
            await problem_response(Problem("validation-failed", str(fault)), scope)(scope, receive, leave)
        except ClientDisconnect:
            pass
        except Exception as fault:
            log.error("request failed", request=request_id, path=scope["path"], exc_info=fault)
            if status:
                raise  # the answer has begun; only cutting it off tells the client
            mistake = Problem(
                "internal-error", f"the service made a mistake; its log has more under {request_id}"
            )
            await problem_response(mistake, scope)(scope, receive, leave)
        finally:
            template = getattr(scope.get("route"), "path", _NO_ROUTE)
            self._telemetry.on_request(scope["method"], template, status, time.perf_counter() - began)

    def _limited(self, path: str, headers: dict[bytes, bytes], receive: Receive) -> Receive:
        """Refuse what is encoded or said to be too large; count what comes without a length."""
        encoding = headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding != b"identity":
            raise Problem(
                "unsupported-media-type",
                f'Content-Encoding "{encoding.decode("latin-1")}" is not read; send the body as it is',
            )
        setting = _MOST_BYTES.get(path, "body_bytes")
        most: int = getattr(self._limits, setting)
        length = headers.get(b"content-length")
        if length is not None and length.isdigit():
            if int(length) > most:
                raise _too_large(setting, most, f"{int(length)} bytes were announced")
            return receive
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:
                raise _too_large(setting, most, "more came in")
            return message

        return counted

    def _no_route(self, scope: Scope) -> Problem:
        """404 or 405. The router itself knows only the first of several routes of a path."""
        method, path = scope["method"], scope["path"]
        routes = [route for route in self._router.routes if isinstance(route, Route)]
        here = [route for route in routes if route.path_regex.match(path)]
        known = {method for route in here for method in route.methods or ()}
        allowed = ", ".join(sorted(known | {"HEAD"} if "GET" in known else known))
        if not here:
            return Problem("not-found", f"there is nothing at {path[:200]}; /openapi.json lists all paths")
        return Problem(
            "method-not-allowed",
            f"{method} is not known at {path}; known are {allowed}",
            headers={"Allow": allowed},
        )


def _too_large(setting: str, most: int, found: str) -> Problem:
    return Problem(
        "payload-too-large",
        f"a body may have {most} bytes and {found}; "
        f"put large data where tasks can read it and pass its address, or raise limits.{setting}",
        headers={"Connection": "close"},
    )
