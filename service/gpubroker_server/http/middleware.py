"""The checks of a request before its route runs (host, token, encoding, size), and the answers to
exceptions."""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import structlog
from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from gpubroker_server.core.domain.limits import ServiceLimits
from gpubroker_server.http.answering import Answering, ClientStalled
from gpubroker_server.http.faults import invalid, request_faults
from gpubroker_server.http.identity import Callers
from gpubroker_server.http.ids import Ids
from gpubroker_server.http.problems import PAGES, Problem, problem_response
from gpubroker_server.http.proxies import FORWARDED_FOR, TrustedProxies, current_prefix
from gpubroker_server.ports.store import Outgrown, StoreExhausted, StoreUnavailable, Unstorable
from gpubroker_server.telemetry.logs import current_request, log_answered
from gpubroker_server.telemetry.metrics import Telemetry

log = structlog.get_logger("gpubroker.gateway")

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/openapi.json"})
"""The paths that are answered without a token, as are those below PAGES. Every other path needs one, known
or not."""

_BODY_LIMITS = {"/tasks/batch": "batch_body_bytes", "/objects": "object_bytes"}
"""Path -> the setting that limits its bodies. Other paths have `body_bytes`."""

_NO_ROUTE = "unmatched"

LINGER_SECONDS = 2.0


class RequestMiddleware:
    """The outermost ASGI application. Every exception is answered with a problem, and no traceback leaves the
    process."""

    def __init__(
        self,
        router: APIRouter,
        *,
        parts: Mapping[type, object],
        callers: Callers,
        ids: Ids,
        limits: ServiceLimits,
        telemetry: Telemetry,
        access_log: bool = False,
        disk_full: Callable[[], str] = str,
        proxies: TrustedProxies | None = None,
    ) -> None:
        """`parts` maps a type to the object of this type that routes get as a parameter. `disk_full` returns
        a text about a full disk, or an empty one. `access_log` says whether each request is logged."""
        self._router = router
        self._fixed = {
            (method, route.path): route
            for route in reversed(router.routes)
            if isinstance(route, APIRoute) and not route.param_convertors
            for method in route.methods or ()
        }
        """The routes without path parameters, by method and path: one look-up replaces a match with each
        pattern."""
        self._parts = parts
        self._callers = callers
        self._ids = ids
        self._limits = limits
        self._telemetry = telemetry
        self._access_log = access_log
        self._disk_full = disk_full
        self._proxies = proxies or TrustedProxies()

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
            scope = {**scope, "method": "GET"}  # uvicorn leaves the body out of the answer
        request_id = self._ids.exchange()
        current_request.set(request_id)
        scope["state"] = {"parts": self._parts, "request_id": request_id}
        prefix = ""
        if self._proxies.may_be_below_a_path:
            prefix = self._proxies.prefix_of(_peer_of(scope), scope["headers"])
            current_prefix.set(prefix)
        answering = Answering(send, request_id, prefix)
        if scope["path"] != "/":
            scope["path"] = scope["path"].rstrip("/") or "/"
        try:
            await self._route(scope, receive, answering)
        except ClientStalled:
            if answering.abort():
                while (await receive())["type"] != "http.disconnect":
                    pass
        except ClientDisconnect:
            pass
        except Exception as fault:
            problem = self._problem_of(fault, scope)
            if answering.status:
                raise  # The answer has begun, so only closing the connection tells the client of the fault.
            refusal = problem_response(problem, scope)
            if problem.code == "payload-too-large":
                await _answer_while_it_sends(refusal, scope, receive, answering)
            else:
                await refusal(scope, receive, answering)
        finally:
            template = getattr(scope.get("route"), "path", _NO_ROUTE)
            seconds = time.perf_counter() - began
            self._telemetry.on_request(scope["method"], template, answering.status, seconds)
            if self._access_log:
                caller = scope["state"].get("identity")
                named = (None, None) if caller is None else (caller.name, caller.tenant)
                origin = self._client_of(scope)
                log_answered(scope["method"], scope["path"], answering.status, seconds, *named, client=origin)

    def _client_of(self, scope: Scope) -> str:
        forwarded = (value for name, value in scope["headers"] if name == FORWARDED_FOR)
        return self._proxies.client_of(_peer_of(scope), forwarded)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, headers = scope["state"], dict(scope["headers"])
        state["headers"] = headers
        self._callers.check_host(headers.get(b"host", b""))
        authorization = headers.get(b"authorization")
        is_open = scope["path"] in OPEN_PATHS or (
            authorization is None and scope["path"].startswith(f"{PAGES}/")
        )
        state["identity"] = None if is_open else self._callers.identify(authorization)
        receive = self._limited(scope["path"], headers, receive)
        route = self._fixed.get((scope["method"], scope["path"]))
        if route is None:
            await self._router(scope, receive, send)
        else:
            scope.update(route=route, endpoint=route.endpoint, path_params={})
            await route.app(scope, receive, send)

    def _limited(self, path: str, headers: Mapping[bytes, bytes], receive: Receive) -> Receive:
        """Return the `receive` that limits the body: one without a Content-Length is counted as it arrives.
        Raises Problem for an encoded body, and for a Content-Length that is too large."""
        encoding = headers.get(b"content-encoding")
        if encoding is not None and (encoding := encoding.strip().lower()) != b"identity":
            raise Problem(
                "unsupported-media-type",
                f'Content-Encoding "{encoding.decode("latin-1")}" is not supported; send the body as it is',
            )
        setting = _BODY_LIMITS.get(path, "body_bytes")
        max_bytes: int = getattr(self._limits, setting)
        length = headers.get(b"content-length")
        if length is not None and length.isdigit():
            if int(length) > max_bytes:
                raise _too_large(setting, max_bytes, f"this one has {int(length)} bytes")
            return receive
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > max_bytes:
                raise _too_large(setting, max_bytes, "this one has more")
            return message

        return counted

    def _problem_of(self, fault: Exception, scope: Scope) -> Problem:
        request_id = scope["state"]["request_id"]
        match fault:
            case Problem():
                return fault
            case RequestValidationError():
                return _refused(fault, scope["route"])
            case HTTPException():
                return self._no_route(scope)
            case Outgrown():
                return Problem("follower-stale", str(fault))
            case StoreUnavailable():
                log.debug("database not reached", request=request_id, fault=str(fault))
                cause = str(fault) if isinstance(fault, StoreExhausted) else self._disk_full()
                more = "nothing was changed; send the request again later"
                return Problem("store-unavailable", f"{cause}; {more}" if cause else "")
            case Unstorable():
                return Problem("validation-failed", str(fault))
        log.error("request failed", request=request_id, path=scope["path"], exc_info=fault)
        return Problem("internal-error", request_id=request_id)

    def _no_route(self, scope: Scope) -> Problem:
        """Return a problem with status 404 or 405. The routes are searched again, because the router looks
        only at the first route of a path."""
        method, path = scope["method"], scope["path"]
        routes = [route for route in self._router.routes if isinstance(route, Route)]
        here = [route for route in routes if route.path_regex.match(path)]
        methods = {method for route in here for method in route.methods or ()}
        if not here:
            prefix = current_prefix.get()
            if prefix and path.startswith(f"{prefix}/"):
                detail = f"there is nothing at {path[:200]}: have the proxy take {prefix} off the path"
                return Problem("not-found", detail)
            return Problem("not-found", f"there is nothing at {path[:200]}; /openapi.json lists all paths")
        allowed = ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))
        return Problem(
            "method-not-allowed", headers={"Allow": allowed}, path=path, method=method, allowed=allowed
        )


def _peer_of(scope: Scope) -> str:
    """Return the address at the other end of the connection."""
    peer: str = scope["client"][0] if scope["client"] else ""
    return peer


def _refused(fault: RequestValidationError, route: APIRoute) -> Problem:
    """Turn all that FastAPI found wrong with a request into one problem."""
    try:
        return invalid(*request_faults(fault, route))
    except Problem as problem:
        return problem


async def _answer_while_it_sends(refusal: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Send the refusal at once, and drop the rest of the body for up to `LINGER_SECONDS`. A connection that
    is closed with unread bytes is reset, and a client or proxy that is still sending would lose the
    answer."""

    async def unfinished(message: Message) -> None:
        is_body = message["type"] == "http.response.body"
        await send({**message, "more_body": True} if is_body else message)

    await refusal(scope, receive, unfinished)
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while (await receive()).get("more_body"):
                pass
    await send({"type": "http.response.body", "body": b""})


def _too_large(setting: str, max_bytes: int, found: str) -> Problem:
    return Problem(
        "payload-too-large",
        f"a body may have {max_bytes} bytes, and {found}; "
        "store large data as an object (POST /objects, broker.put, gpubroker upload) and pass "
        f'{{"object": id}} as the argument, or raise limits.{setting}',
        headers={"Connection": "close"},
    )
