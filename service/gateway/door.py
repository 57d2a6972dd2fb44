"""What every request passes before a route sees it: host, encoding, size, token; and how it leaves."""

import re
import time
from functools import lru_cache

import structlog
from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from service.gateway.direct import DirectRoute
from service.gateway.identity import Identity
from service.gateway.parts import GatewayParts
from service.gateway.problems import Problem, problem_response
from service.ports import Outgrown, StoreUnavailable, Unstorable
from service.telemetry import Telemetry

log = structlog.get_logger("gpubroker.gateway")

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/openapi.json"})
"""Answered without a token. Everything else, known or not, asks for one."""

BATCH_PATH = "/tasks/batch"
"""Its body may be larger."""

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
_HOST = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[^:\[\]]+))(?::\d{1,5})?")
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
        self._tokens = parts.identity
        self._ids = parts.ids
        self._hosts = LOOPBACK_NAMES | {host.strip("[]").lower() for host in parts.allowed_hosts}
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
            self._check_host(headers)
            state["identity"] = self._identity(scope["path"], headers)
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

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """A page that a browser was lured to may know our address, but it cannot fake this name."""
        host = _without_port(headers.get(b"host", b""))
        if host not in self._hosts:
            known = ", ".join(sorted(self._hosts))
            raise Problem(
                "host-not-allowed",
                f'the service does not go by the name "{host}" but by {known}; '
                "use one of those, or have the operator add this one to allowed_hosts",
            )

    def _identity(self, path: str, headers: dict[bytes, bytes]) -> Identity | None:
        if path in OPEN_PATHS:
            return None
        given = headers.get(b"authorization")
        if given is None:
            raise _unauthenticated("no token was sent", "")
        scheme, _, secret = given.decode("latin-1").partition(" ")
        if scheme.lower() != "bearer":
            raise _unauthenticated(f'the Authorization scheme is "{scheme[:20]}"', "")
        identity = self._tokens.identify(secret.strip())
        if identity is None:
            raise _unauthenticated("the token is unknown or has expired", ', error="invalid_token"')
        return identity

    def _limited(self, path: str, headers: dict[bytes, bytes], receive: Receive) -> Receive:
        """Refuse what is encoded or said to be too large; count what comes without a length."""
        encoding = headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding != b"identity":
            raise Problem(
                "unsupported-media-type",
                f'Content-Encoding "{encoding.decode("latin-1")}" is not read; send the body as it is',
            )
        setting = "batch_body_bytes" if path == BATCH_PATH else "body_bytes"
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


def _unauthenticated(found: str, challenge: str) -> Problem:
    return Problem(
        "unauthenticated",
        f"{found}; send Authorization: Bearer <token> "
        "(the first one is in client.json in the service's data directory)",
        headers={"WWW-Authenticate": f'Bearer realm="gpubroker"{challenge}'},
    )


@lru_cache(256)
def _without_port(header: bytes) -> str:
    """`[::1]:8470` -> `::1`, `localhost:8470` -> `localhost`; what is neither stays as it is."""
    host = header.decode("latin-1")
    parts = _HOST.fullmatch(host)
    return host if parts is None else (parts["six"] or parts["name"]).lower()
