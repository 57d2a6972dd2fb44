"""Routes of ordinary FastAPI, with three additions: `Call` gives the body as bytes, scopes are a dependency,
and msgspec writes answers whose types are in `gpubroker.wire`.

An endpoint is declared with `Resource.route`. Its parameters are FastAPI's: path parameters as `str`, one
`Annotated[<Query model>, Query()]`, headers, one `JsonBody[<model>]`, and dependencies: `Parts`, `Caller`, or
the request itself as `call: Call`.
"""

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from fastapi import APIRouter, Depends, Request, Response, Security, params
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer, SecurityScopes
from gpubroker.wire.answered import plain
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gpubroker_server.http.answering import JSON, JsonAnswer
from gpubroker_server.http.bodies import BinaryBody, JsonText, Query
from gpubroker_server.http.faults import header_fault, invalid
from gpubroker_server.http.identity import Identity, Scope
from gpubroker_server.http.openapi import REFERENCE, is_wire_form, reference_to
from gpubroker_server.http.problems import CATALOGUE, MEDIA_TYPE, Problem

JSON_LENGTH = "Inference-Header-Content-Length"
"""The header of Triton's protocol that gives the length of the JSON if binary data follows it."""
_encode = msgspec.json.Encoder(enc_hook=plain).encode
"""Encodes an answer as JSON. Floats that JSON cannot express become null."""


class Call(Request):
    """A request whose body is read as bytes."""

    _whole_body: bytes | None = None

    async def json(self) -> bytes:
        """Return the body as it was sent: `JsonBody` parses and validates it in one pass."""
        return await self.body()

    async def body(self) -> bytes:
        if self._whole_body is None:
            first, has_more = await self._next_part()
            rest = [part async for part in self.parts()] if has_more else ()
            self._whole_body = b"".join((first, *rest)) if rest else first
        return self._whole_body

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body part by part as it arrives, without keeping it. Starlette's `stream` is slow for a
        body of one message."""
        has_more = True
        while has_more:
            part, has_more = await self._next_part()
            yield part

    async def _next_part(self) -> tuple[bytes, bool]:
        """Return the next part of the body, and True if more parts follow. Raises ClientDisconnect."""
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        return message.get("body", b""), message.get("more_body", False)

    @property
    def identity(self) -> Identity:
        """The holder of the request's token. Do not read it in routes that need no token."""
        identity: Identity = self.scope["state"]["identity"]
        return identity

    def header(self, name: bytes) -> str | None:
        """Return the value of a header, or None. `name` must be in lower case, as in ASGI."""
        value: bytes | None = self.scope["state"]["headers"].get(name)
        return None if value is None else value.decode("latin-1")


class BinaryCall(Call):
    """A request whose body is JSON that binary data may follow. If it does, a header gives the length of the
    JSON."""

    async def body(self) -> bytes:
        """Return the JSON part of the body. Raises Problem header-invalid if the length is invalid."""
        whole = await super().body()
        return whole[: self._json_length(whole)]

    async def binary_data(self) -> bytes:
        """Return the bytes that follow the JSON."""
        whole = await super().body()
        length = self._json_length(whole)
        return b"" if length is None else whole[length:]

    def _json_length(self, body: bytes) -> int | None:
        """Return how many bytes of the body are JSON; None if all are. Raises Problem."""
        given = self.header(JSON_LENGTH.lower().encode())
        if given is None:
            return None
        if not (given.isascii() and given.isdigit() and len(given) < 20 and int(given) <= len(body)):
            detail = f'"{given[:30]}" is not the length of the JSON in a body of {len(body)} bytes'
            raise invalid(header_fault(JSON_LENGTH, detail))
        return int(given)


def answer(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None, *, member: bytes = b""
) -> Response:
    """Return a JSON answer.

    `content` is a value of a type in `gpubroker.wire`. `member` is JSON text that is added to the object as
    its last member.
    """
    body = _encode(content)
    if member:
        body = b"".join((body[:-1], b",", member, b"}"))
    return json_answer(body, status, headers)


def json_answer(text: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer whose body is `text`, which must be JSON."""
    return JsonAnswer(text, status, headers)


_BEARER = HTTPBearer(scheme_name="token", description="`Authorization: Bearer gpb_...`", auto_error=False)


def app_part(kind: type[Any]) -> Any:
    """Return the dependency that gives an endpoint the part of the app that has this type."""

    async def find(call: Request) -> Any:
        return call.scope["state"]["parts"][kind]

    return Depends(find)


async def _sender(call: Request) -> Identity:
    identity: Identity = call.scope["state"]["identity"]
    return identity


Caller = Annotated[Identity, Depends(_sender)]
"""The holder of the token, in routes that need one."""


async def _permitted(
    call: Request, needed: SecurityScopes, caller: Caller, _documented: Annotated[Any, Depends(_BEARER)]
) -> None:
    """Check that the token has one of the scopes that the route names. Raises Problem forbidden."""
    caller.require(needed.scopes[0], f"{call.method} {call.url.path}", *needed.scopes[1:])


class _NoParameters(Query):
    pass


async def _without_parameters(_query: Annotated[_NoParameters, params.Query()]) -> None:
    """Refuse all query parameters."""


async def _as_json(call: Request) -> None:
    """Check the content type of the body. Raises Problem unsupported-media-type if a body that is not empty
    has a Content-Type other than JSON."""
    is_binary = JSON_LENGTH in call.headers
    if call.headers.get("content-type") not in (None, JSON) and not is_binary and await call.body():
        check_content_type(call.headers["content-type"])


Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
NO_RESPONSES: Mapping[int | str, dict[str, Any]] = MappingProxyType({})
STORED = "Stored; the leader has not carried it out yet."
"""The description of the answer 202 to a request that the leader carries out."""


class Route(APIRoute):
    """An ordinary route; its endpoint may take the request as a `Call`."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        if self.body_field and not any(
            isinstance(mark, JsonText) for mark in self.body_field.field_info.metadata
        ):
            raise TypeError(f"the body of {endpoint.__name__} must be a JsonBody")
        self.app = AsyncExitStackMiddleware(self.app)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        body = None if self.body_field is None else self.body_field.field_info.annotation
        is_binary = isinstance(body, type) and issubclass(body, BinaryBody)
        call_class = BinaryCall if is_binary else Call

        async def handle_call(request: Request) -> Response:
            try:
                return await handle(call_class(request.scope, request.receive))
            except HTTPException as wrapped:
                # FastAPI wraps every exception that reading the body raises: a disconnect, or too many bytes.
                raise wrapped.__cause__ or wrapped from None

        return handle_call


class Resource:
    """The routes of one resource."""

    def __init__(self, tag: str, route_class: type[APIRoute] = Route) -> None:
        self._router = APIRouter(route_class=route_class, tags=[tag])
        self.routes = self._router.routes
        self.forms: list[Any] = []
        """The types of the routes' answers that are in `gpubroker.wire`."""

    def route(
        self,
        at: str,
        id: str,
        scope: Scope | tuple[Scope, ...] | None,
        view: Any,
        problems: str = "",
        *,
        accepted: str = "",
        responses: Mapping[int | str, dict[str, Any]] = NO_RESPONSES,
        **options: Any,
    ) -> Callable[[Endpoint], Endpoint]:
        """Return a decorator that declares an endpoint.

        `at` is a method and a path, such as `GET /tasks`. `id` is the operation id in the OpenAPI document.
        `scope` is the scope that the token needs, or several of which it needs one; it is checked before
        anything else, and None stands for a route that needs no token. `view` is the type of the answer.
        `problems` lists, separated by spaces, the codes of problems that not every route has. `accepted`
        describes the answer 202 if the route may also give one of type `view`. `options` are passed to
        FastAPI.
        """
        declared: dict[int | str, dict[str, Any]] = {
            status: {**described} for status, described in responses.items()
        }
        if accepted:
            declared[202] = {"model": view, "description": accepted}
        needs: list[params.Depends] = []
        codes = list(dict.fromkeys([*problems.split(), "validation-failed"]))
        if scope is not None:
            enough = scope if isinstance(scope, tuple) else (scope,)
            needs.append(Security(_permitted, scopes=[scope.value for scope in enough]))
            codes = ["unauthenticated", "forbidden", *codes]
        if is_wire_form(view):
            declared.setdefault(options.get("status_code", 200), {})["model"] = view
        elif view is not None:
            options["response_model"] = view
        self._describe_wire_forms(declared)
        declared |= _problem_responses(codes)
        method, path = at.split()

        def declare(endpoint: Endpoint) -> Endpoint:
            add = self._router.api_route(
                path,
                methods=[method],
                operation_id=id,
                responses=declared,
                dependencies=[*needs, *_refusing(endpoint)],
                **options,
            )
            return add(endpoint)

        return declare

    def _describe_wire_forms(self, declared: Mapping[int | str, dict[str, Any]]) -> None:
        """Replace each Struct among the responses by a reference to its schema, because FastAPI takes no
        Struct as a model."""
        for response in declared.values():
            if is_wire_form(response.get("model")):
                form = response.pop("model")
                self.forms.append(form)
                response["content"] = {JSON: {"schema": reference_to(form)}, **response.get("content", {})}


def _refusing(endpoint: Callable[..., Any]) -> list[params.Depends]:
    """Return the dependencies that refuse query parameters if the endpoint takes none, and check the content
    type if it takes a body."""
    hints = get_type_hints(endpoint, include_extras=True).values()
    marks = [mark for hint in hints if get_origin(hint) is Annotated for mark in get_args(hint)[1:]]
    needs = []
    if not any(isinstance(mark, params.Query) for mark in marks):
        needs.append(Depends(_without_parameters))
    if any(isinstance(mark, params.Body) for mark in marks):
        needs.append(Depends(_as_json))
    return needs


def check_content_type(given: str | None) -> None:
    """Check a Content-Type header. Every media type of JSON is accepted, and so is a request without the
    header: the parser decides whether the body is JSON. Raises Problem unsupported-media-type otherwise."""
    if given is None or given == JSON:
        return
    kind = given.partition(";")[0].strip().lower()
    if kind == JSON or (kind.startswith("application/") and kind.endswith("+json")):
        return
    raise Problem(
        "unsupported-media-type",
        f'Content-Type is "{kind}"; send application/json, or no Content-Type at all '
        '(curl: -H "Content-Type: application/json")',
    )


def _problem_responses(codes: Sequence[str]) -> dict[int | str, dict[str, Any]]:
    by_status: dict[int | str, list[str]] = {}
    for code in codes:
        by_status.setdefault(CATALOGUE[code].status, []).append(code)
    content = {MEDIA_TYPE: {"schema": {"$ref": REFERENCE.format(name="ProblemDocument")}}}
    responses: dict[int | str, dict[str, Any]] = {
        status: {"description": f"Problem: {', '.join(known)}.", "content": content}
        for status, known in by_status.items()
    }
    return {**responses, "default": {"description": "Any other problem.", "content": content}}
