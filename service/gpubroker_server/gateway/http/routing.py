"""Routes declared the FastAPI way and answered directly.

An endpoint's signature is its declaration: `call: Call`, path parameters as `str`, at most one
`Annotated[<Query model>, Query()]`, headers as `Annotated[..., Header(alias=...)]`, at most one body model.
FastAPI builds the OpenAPI document from it. The request itself goes past FastAPI's dependency machinery: raw
bytes are validated by pydantic once, the endpoint is called, and what it returns is sent. That is about 40 %
more requests per second, and one place where every fault of a request is collected before it is refused.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from fastapi import Request, Response, Security, params
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Send
from starlette.types import Scope as ScopeOfRequest

from gpubroker_server.gateway.http.arguments import members_of, pieces_of, value_of
from gpubroker_server.gateway.http.bodies import BytesBehind, InPieces
from gpubroker_server.gateway.http.faults import (
    Faulty,
    body_faults,
    parameter_faults,
    refused,
    unknown_parameter,
)
from gpubroker_server.gateway.http.identity import Identity, Scope
from gpubroker_server.gateway.http.problems import CATALOGUE, MEDIA_TYPE, Fault, Problem
from gpubroker_server.gateway.http.queries import Query
from gpubroker_server.gateway.parts import GatewayParts

_BEARER = HTTPBearer(scheme_name="token", description="`Authorization: Bearer gpb_...`", auto_error=False)
_JSON = "application/json"
HEAD_LENGTH = "Inference-Header-Content-Length"
"""The header of Triton's protocol that says how long the JSON is where bytes follow it."""
_encode = msgspec.json.Encoder().encode
"""What is no number in JSON becomes null."""


class Call(Request):
    """One request, with what a route needs at hand."""

    async def body(self) -> bytes:
        """All of it. Most bodies come in one piece, for which Starlette's stream of pieces is slow."""
        if not hasattr(self, "_whole_body"):
            message = await self.receive()
            pieces = [message.get("body", b"")]
            while message.get("more_whole_body", False):
                message = await self.receive()
                pieces.append(message.get("body", b""))
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            self._whole_body = b"".join(pieces)
        return self._whole_body

    @property
    def parts(self) -> GatewayParts:
        parts: GatewayParts = self.scope["state"]["parts"]
        return parts

    @property
    def identity(self) -> Identity:
        """Who asks. Only open paths have nobody, and they do not look."""
        identity: Identity = self.scope["state"]["identity"]
        return identity

    async def behind(self) -> bytes:
        """What follows the JSON of a body of `BytesBehind`."""
        head_bytes = _head_bytes(self, await self.body())
        return b"" if head_bytes is None else (await self.body())[head_bytes:]

    def header(self, name: bytes) -> str | None:
        """`name` in lower case, as ASGI has it."""
        value: bytes | None = self.scope["state"]["headers"].get(name)
        return None if value is None else value.decode("latin-1")

    def require(self, scope: str, what_for: str = "") -> None:
        """Raises Problem if the token lacks the scope."""
        if not self.identity.may(scope):
            purpose = what_for or f"{self.method} {self.url.path}"
            raise Problem(
                "forbidden",
                f'token "{self.identity.name}" lacks the scope {scope}, which {purpose} needs; '
                "ask an admin for a token that has it",
            )


def needs(scope: Scope) -> params.Security:
    """Declares the scope that a route asks for: it stands in the document and is checked first."""
    security: params.Security = Security(_BEARER, scopes=[scope.value])
    return security


def problems(*codes: str) -> dict[int | str, dict[str, Any]]:
    """Declares how a route may refuse, besides what every route may answer."""
    by_status: dict[int | str, list[str]] = {}
    for code in codes:
        by_status.setdefault(CATALOGUE[code].status, []).append(code)
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}}
    declared: dict[int | str, dict[str, Any]] = {
        status: {"description": f"Problem: {', '.join(known)}.", "content": content}
        for status, known in by_status.items()
    }
    declared["default"] = {"description": "Any other problem.", "content": content}
    return declared


def answer(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None, *, member: bytes = b""
) -> Response:
    """A JSON answer, from plain dicts and lists. `member` is one more of the object's, as JSON text."""
    body = _encode(content)
    if member:
        body = b"".join((body[:-1], b",", member, b"}"))
    return json_answer(body, status, headers)


def json_answer(text: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer that is JSON already."""
    return Response(text, status, headers, _JSON)


Reader = Callable[[Call, bytes], Any]
"""Takes one argument of an endpoint out of the request. Raises Faulty."""


class DirectRoute(APIRoute):
    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        needed = [need for need in self.dependencies if isinstance(need, params.Security)]
        self._scopes = [scope for need in needed for scope in need.scopes or ()]
        self._readers = _readers_of(endpoint, self.param_convertors)
        self.app = self.answer

    async def answer(self, scope: ScopeOfRequest, receive: Receive, send: Send) -> None:
        call = Call(scope, receive)
        for needed in self._scopes:
            call.require(needed)
        response = await self.endpoint(call, **await self._arguments(call))
        await response(scope, receive, send)

    async def _arguments(self, call: Call) -> dict[str, Any]:
        """What the endpoint asks for. Raises one Problem with all faults of the request."""
        raw = b"" if self.body_field is None else await call.body()
        arguments: dict[str, Any] = {}
        faults: list[Fault] = []
        for name, read in self._readers:
            try:
                arguments[name] = read(call, raw)
            except Faulty as faulty:
                faults += faulty.faults
        if faults:
            raise refused(faults)
        return arguments


def _readers_of(endpoint: Callable[..., Any], path_names: Mapping[str, Any]) -> list[tuple[str, Reader]]:
    hints = get_type_hints(endpoint, include_extras=True)
    return [
        (name, _reader_of(name, hints[name], parameter.default, name in path_names))
        for name, parameter in inspect.signature(endpoint).parameters.items()
        if hints[name] is not Call
    ]


def _reader_of(name: str, hint: Any, default: Any, is_path: bool) -> Reader:
    if is_path:
        return lambda call, _raw: call.path_params[name]
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    for mark in marks:
        if isinstance(mark, params.Query):
            return _query_reader(get_args(hint)[0])
        if isinstance(mark, params.Header):
            return _header_reader(mark.alias or name, TypeAdapter(hint))
    if isinstance(hint, type) and issubclass(hint, InPieces):
        return _pieces_reader(hint)
    if isinstance(hint, type) and issubclass(hint, BytesBehind):
        return _head_reader(hint)
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return _body_reader(hint, default)
    raise TypeError(
        f"parameter {name!r} of an endpoint must be a Call, path, query, header or body; is {hint!r}"
    )


def _body_reader(model: type[BaseModel], default: Any) -> Reader:
    """A parameter with a default is an optional body: nothing sent means the default."""
    validate = TypeAdapter(model).validator.validate_json
    optional = default is not inspect.Parameter.empty

    def read(call: Call, raw: bytes) -> Any:
        if optional and not raw:
            return default
        _check_content_type(call.header(b"content-type"))
        try:
            return validate(raw)
        except ValidationError as error:
            raise Faulty(body_faults(error, model)) from None

    return read


def _head_reader(model: type[BytesBehind]) -> Reader:
    whole, head = _body_reader(model, inspect.Parameter.empty), TypeAdapter(model).validator.validate_json

    def read(call: Call, raw: bytes) -> Any:
        head_bytes = _head_bytes(call, raw)
        if head_bytes is None:
            return whole(call, raw)
        try:
            return head(raw[:head_bytes])
        except ValidationError as error:
            raise Faulty(body_faults(error, model)) from None

    return read


def _head_bytes(call: Call, raw: bytes) -> int | None:
    """None if the whole body is JSON. Raises Faulty."""
    given = call.header(HEAD_LENGTH.lower().encode())
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) < 20 and int(given) <= len(raw)):
        detail = f'"{given[:30]}" is no length of the JSON at the beginning of {len(raw)} bytes'
        raise Faulty([Fault(pointer=f"header:{HEAD_LENGTH}", detail=detail, code="bad-header")])
    return int(given)


def _pieces_reader(model: type[InPieces]) -> Reader:
    def read(call: Call, raw: bytes) -> Any:
        _check_content_type(call.header(b"content-type"))
        members = members_of(raw)
        if members is None:
            detail = f'must be an object, such as {{"{model.pieces}": [...]}}'
            raise Faulty([Fault(pointer="", detail=detail, code="model-type")])
        parts = {name: value_of(text) for name, text in members.items() if name != model.pieces}
        if model.pieces in members:
            found = pieces_of(members[model.pieces])
            parts[model.pieces] = value_of(members[model.pieces]) if found is None else found
        try:
            return model.model_validate(parts)
        except ValidationError as error:
            raise Faulty(body_faults(error, model)) from None

    return read


def _check_content_type(given: str | None) -> None:
    """JSON by any of its names, or nothing said. What the body is then decides its parser."""
    if given is None or given == _JSON:
        return
    kind = given.partition(";")[0].strip().lower()
    if kind == _JSON or (kind.startswith("application/") and kind.endswith("+json")):
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
            read_model = model.model_validate(values)
        except ValidationError as error:
            faults += parameter_faults(error, "query", model)
        if faults:
            raise Faulty(faults)
        return read_model

    return read


def _header_reader(header: str, adapter: TypeAdapter[Any]) -> Reader:
    """Headers are optional here: one that was not sent is None."""
    name = header.lower().encode()

    def read(call: Call, _raw: bytes) -> Any:
        given = call.header(name)
        if given is None:
            return None
        try:
            return adapter.validate_python(given)
        except ValidationError as error:
            detail = error.errors(include_url=False)[0]["msg"]
            raise Faulty([Fault(pointer=f"header:{header}", detail=detail, code="bad-header")]) from None

    return read
