"""A request as a route sees it, and routes that are declared the FastAPI way but answered directly.

An endpoint's signature is its declaration: any of `call: Call`, its resource's parts as
`Annotated[<type>, PARTS]`, path parameters as `str`, at most one `Annotated[<Query model>, Query()]`, headers
as `Annotated[..., Header(alias=...)]`, at most one body model. FastAPI builds the OpenAPI document from it.
The request itself bypasses FastAPI's dependency machinery: pydantic validates the raw bytes once, and the
endpoint is called. That is about 40 % more requests per second, and a refusal has every fault of the request.
"""

import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec
from fastapi import APIRouter, Depends, Request, Response, Security, params
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Send
from starlette.types import Scope as RequestScope

from gpubroker_server.gateway.http.bodies import BinaryBody, ListBody, Query
from gpubroker_server.gateway.http.faults import (
    InvalidPart,
    body_faults,
    duplicate_key,
    invalid,
    parameter_faults,
    unknown_parameter,
)
from gpubroker_server.gateway.http.identity import Identity, Scope
from gpubroker_server.gateway.http.problems import CATALOGUE, MEDIA_TYPE, Fault, Problem
from gpubroker_server.gateway.http.times import rfc3339_or_none

V = TypeVar("V")

JSON = "application/json"
JSON_LENGTH = "Inference-Header-Content-Length"
"""The header of Triton's protocol that gives the length of the JSON if binary data follows it."""
_encode = msgspec.json.Encoder().encode
"""Floats that JSON cannot express become null."""


class Call(Request):
    _whole_body: bytes | None = None

    async def body(self) -> bytes:
        """All of it."""
        if self._whole_body is None:
            self._whole_body = b"".join([part async for part in self.parts()])
        return self._whole_body

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it comes, which is not kept. Starlette's own stream is slow for one message."""
        more = True
        while more:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            yield message.get("body", b"")
            more = message.get("more_body", False)

    @property
    def identity(self) -> Identity:
        """The sender. Do not read it in routes that need no token."""
        identity: Identity = self.scope["state"]["identity"]
        return identity

    def header(self, name: bytes) -> str | None:
        """`name` in lower case, as ASGI has it."""
        value: bytes | None = self.scope["state"]["headers"].get(name)
        return None if value is None else value.decode("latin-1")

    def json_length(self, body: bytes) -> int | None:
        """How many bytes of the body are JSON; None if all are. Raises InvalidPart."""
        given = self.header(JSON_LENGTH.lower().encode())
        if given is None:
            return None
        if not (given.isascii() and given.isdigit() and len(given) < 20 and int(given) <= len(body)):
            detail = f'"{given[:30]}" is not the length of the JSON in a body of {len(body)} bytes'
            raise InvalidPart([Fault(pointer=f"header:{JSON_LENGTH}", detail=detail, code="bad-header")])
        return int(given)

    async def binary_data(self) -> bytes:
        """What follows the JSON of a BinaryBody."""
        body = await self.body()
        length = self.json_length(body)
        return b"" if length is None else body[length:]


def answer(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None, *, member: bytes = b""
) -> Response:
    """A JSON answer. `content` is plain dicts and lists; `member` is one more member, as JSON text."""
    body = _encode(content)
    if member:
        body = b"".join((body[:-1], b",", member, b"}"))
    return json_answer(body, status, headers)


def json_answer(text: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer that is JSON text already."""
    return Response(text, status, headers, JSON)


def view_of(view: type[V], source: object, **others: object) -> V:
    """The TypedDict `view`: the `others`, and an attribute of the source for each other field; times (`_at`)
    as RFC 3339."""
    own = {name: getattr(source, name) for name in view.__annotations__ if name not in others}
    times = {name: rfc3339_or_none(value) for name, value in own.items() if name.endswith("_at")}
    return cast(V, {**own, **times, **others})


_BEARER = HTTPBearer(scheme_name="token", description="`Authorization: Bearer gpb_...`", auto_error=False)
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


def _given_by_the_app() -> None:
    """Stands in the OpenAPI document for parts, which are no part of a request."""


PARTS: Any = Depends(_given_by_the_app)
"""Marks the parameter of an endpoint that gets its resource's parts."""


Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
NO_RESPONSES: Mapping[int | str, dict[str, Any]] = MappingProxyType({})
STORED = "Stored; the leader has not carried it out yet."
"""Of the answer 202 to a request that the leader carries out."""


class Resource:
    """The routes of one resource."""

    def __init__(self, tag: str) -> None:
        self._router = APIRouter(route_class=DirectRoute, tags=[tag])
        self.routes = self._router.routes

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
        """Declares an endpoint at a method and path, as `GET /tasks`.

        `scope` is checked before anything else: the token needs it, or one of several; None: it needs none.
        `view`: schema of the answer. `problems`: codes, separated by spaces, besides those of every route.
        `accepted`: what the answer 202 means, if it may come with the same schema. `options` are FastAPI's.
        """
        declared: dict[int | str, dict[str, Any]] = {**responses}
        if accepted:
            declared[202] = {"model": view, "description": accepted}
        codes = problems.split()
        if scope is not None:
            enough = scope if isinstance(scope, tuple) else (scope,)
            options["dependencies"] = [Security(_BEARER, scopes=[each.value for each in enough])]
            codes = ["unauthenticated", "forbidden", *codes]
        if view is not None:
            options["response_model"] = view
        declared |= _problem_responses(codes)
        method, path = at.split()
        return self._router.api_route(path, methods=[method], operation_id=id, responses=declared, **options)


def _problem_responses(codes: Sequence[str]) -> dict[int | str, dict[str, Any]]:
    by_status: dict[int | str, list[str]] = {}
    for code in codes:
        by_status.setdefault(CATALOGUE[code].status, []).append(code)
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}}
    responses: dict[int | str, dict[str, Any]] = {
        status: {"description": f"Problem: {', '.join(known)}.", "content": content}
        for status, known in by_status.items()
    }
    return {**responses, "default": {"description": "Any other problem.", "content": content}}


Reader = Callable[[Call, bytes], Any]
"""Reads one argument of an endpoint out of the request and its body. Raises InvalidPart."""


class DirectRoute(APIRoute):
    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        needed = [need for need in self.dependencies if isinstance(need, params.Security)]
        self._scopes = [scope for need in needed for scope in need.scopes or ()]
        """Any of them will do."""
        self._readers = _readers_of(endpoint, self.param_convertors)
        self.app = self.answer

    async def answer(self, scope: RequestScope, receive: Receive, send: Send) -> None:
        call = Call(scope, receive)
        if self._scopes:
            needed, *others = self._scopes
            call.identity.require(needed, f"{scope['method']} {scope['path']}", *others)
        response = await self.endpoint(**await self._arguments(call))
        await response(scope, receive, send)

    async def _arguments(self, call: Call) -> dict[str, Any]:
        """Raises one Problem with all faults of the request."""
        raw = b"" if self.body_field is None else await call.body()
        arguments: dict[str, Any] = {}
        faults: list[Fault] = []
        for name, read in self._readers:
            try:
                arguments[name] = read(call, raw)
            except InvalidPart as part:
                faults += part.faults
        if faults:
            raise invalid(*faults)
        return arguments


def _readers_of(endpoint: Callable[..., Any], path_names: Mapping[str, Any]) -> list[tuple[str, Reader]]:
    """One reader for each parameter of the endpoint."""
    hints = get_type_hints(endpoint, include_extras=True)
    return [
        (name, _reader_of(name, hints[name], parameter.default, name in path_names))
        for name, parameter in inspect.signature(endpoint).parameters.items()
    ]


def _reader_of(name: str, hint: Any, default: Any, is_path: bool) -> Reader:
    if hint is Call:
        return lambda call, _raw: call
    if is_path:
        return lambda call, _raw: call.path_params[name]
    kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    for mark in marks:
        if isinstance(mark, params.Depends):
            return lambda call, _raw: call.scope["state"]["parts"][kind]
        if isinstance(mark, params.Query):
            return _query_reader(kind)
        if isinstance(mark, params.Header):
            return _header_reader(mark.alias or name, TypeAdapter(hint))
    if isinstance(kind, type) and issubclass(kind, ListBody):
        return _list_reader(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return _body_reader(kind, default)
    raise TypeError(
        f"parameter {name!r} of an endpoint must be a Call, parts, path, query, header or body; is {hint!r}"
    )


def _body_reader(model: type[BaseModel], default: Any) -> Reader:
    """A parameter with a default is an optional body: an empty body means the default."""
    validate = TypeAdapter(model).validator.validate_json
    optional, is_binary = default is not inspect.Parameter.empty, issubclass(model, BinaryBody)

    def read(call: Call, raw: bytes) -> Any:
        if optional and not raw:
            return default
        json_bytes = call.json_length(raw) if is_binary else None
        if json_bytes is None:
            _check_content_type(call.header(b"content-type"))
        raw = raw[:json_bytes]
        _check_keys(raw)
        try:
            return validate(raw)
        except ValidationError as error:
            raise InvalidPart(body_faults(error, model)) from None

    return read


def _list_reader(model: type[ListBody]) -> Reader:
    def read(call: Call, raw: bytes) -> Any:
        _check_content_type(call.header(b"content-type"))
        try:
            members = {name: bytes(text) for name, text in _decode_members(raw).items()}
        except msgspec.ValidationError:
            detail = f'must be an object, such as {{"{model.list_name}": [...]}}'
            raise InvalidPart([Fault(pointer="", detail=detail, code="model-type")]) from None
        except msgspec.DecodeError as error:
            raise Problem("malformed-json", why=error) from None
        _check_keys(raw.replace(members.get(model.list_name, b"{"), b"0", 1))  # the route checks the items
        values = {
            name: _items(text) if name == model.list_name else _value(text) for name, text in members.items()
        }
        try:
            return model.model_validate(values)
        except ValidationError as error:
            raise InvalidPart(body_faults(error, model)) from None

    return read


def _check_keys(text: bytes) -> None:
    """Raises InvalidPart."""
    fault = duplicate_key(text)
    if fault is not None:
        raise InvalidPart([fault])


def _items(text: bytes) -> Any:
    """The items of an array as JSON text; the value if it is not an array."""
    try:
        return [bytes(item) for item in _decode_items(text)]
    except msgspec.ValidationError:
        return _value(text)


def _value(text: bytes) -> Any:
    try:
        return from_json(text)
    except ValueError as error:
        raise Problem("malformed-json", why=error) from None


def _check_content_type(given: str | None) -> None:
    """JSON by any of its names, or no header. The parser decides whether the body is JSON."""
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


def _query_reader(model: type[Query]) -> Reader:
    lists = {name for name, field in model.model_fields.items() if get_origin(field.annotation) is list}
    known = model.model_fields.keys()

    def read(call: Call, _raw: bytes) -> Any:
        values: dict[str, Any] = {}
        faults: list[Fault] = []
        for name, value in call.query_params.multi_items():
            if name in lists:
                values.setdefault(name, []).extend(part for part in value.split(",") if part)
            elif name in known or (model.open_names and model.open_names.fullmatch(name)):
                values[name] = value
            else:
                faults.append(unknown_parameter(name, model))
        try:
            query = model.model_validate(values)
        except ValidationError as error:
            faults += parameter_faults(error, "query", model)
        if faults:
            raise InvalidPart(faults)
        return query

    return read


def _header_reader(header: str, adapter: TypeAdapter[Any]) -> Reader:
    """A header is always optional; None if it was not sent."""
    name = header.lower().encode()

    def read(call: Call, _raw: bytes) -> Any:
        given = call.header(name)
        if given is None:
            return None
        try:
            return adapter.validate_python(given)
        except ValidationError as error:
            detail = error.errors(include_url=False)[0]["msg"]
            raise InvalidPart([Fault(pointer=f"header:{header}", detail=detail, code="bad-header")]) from None

    return read
