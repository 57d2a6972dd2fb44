"""What all connections of the data plane share: tokens, limits, counters, servers, lanes and models."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from gpubroker_server.gateway.http.identity import Callers, Identity, Scope
from gpubroker_server.gateway.http.ids import Ids
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.proxy.body_buffer import BUFFER_BYTES, USUAL_BYTES, WaitingBytes
from gpubroker_server.gateway.proxy.inflation import ENCODINGS, inflating
from gpubroker_server.gateway.proxy.lanes import MODEL_TYPE, PRIORITY, TIMEOUT, Lanes
from gpubroker_server.gateway.proxy.operations import Operation, Target, http_target
from gpubroker_server.gateway.proxy.refusals import bad_encoding, body_too_large, no_shared_memory
from gpubroker_server.gateway.proxy.residency.server_choice import Residencies
from gpubroker_server.gateway.proxy.servers import Fleet
from gpubroker_server.ports.backends import Header, RequestHead
from gpubroker_server.ports.store import StoreUnavailable
from gpubroker_server.telemetry.logs import log_answered

IDEMPOTENT: Final = "x-idempotent"
"""A header, `true`: the request may be carried out twice, so that it may go to a second server when the first
one breaks off."""

QUEUE_HEADERS: Final = (PRIORITY, TIMEOUT, MODEL_TYPE)
"""What a request says of its place in its model's lane."""

_TO_US: Final = frozenset(
    {
        *(name.encode() for name in (IDEMPOTENT, *QUEUE_HEADERS)),
        b"authorization",
        b"connection",
        b"content-length",
        b"expect",
        b"host",
        b"keep-alive",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Headers of the client's connection, or for the service. All others are passed on as they came."""

_PLAIN_CONNECTIONS: Final = frozenset({b"", b"close", b"keep-alive"})


TENANT_REQUESTS: Final = 4096
"""What a tenant may have under way if no setting says otherwise."""


class Audit(Protocol):
    async def __call__(self, *, by: str, tenant: str, action: str, subject: str) -> None:
        """Raises StoreUnavailable."""


class ClientHead(NamedTuple):
    """The head of a request over HTTP, and what it means. Clients send equal heads again and again: all that
    can be read in one is read once."""

    target: Target
    passed_on: RequestHead
    to_us: Mapping[bytes, bytes]
    """Headers for the service, and of the client's connection, by lowercase name."""
    queue: tuple[str | None, ...]
    """The values of QUEUE_HEADERS."""
    is_idempotent: bool
    expects_continue: bool
    encoding: bytes
    """Of the body, if Triton might inflate it; else empty."""

    @property
    def body_bytes(self) -> int | None:
        """None: the body comes in chunks."""
        return self.passed_on.body_bytes


def client_head(method: bytes, path: bytes, headers: Sequence[Header]) -> ClientHead:
    to_us: dict[bytes, bytes] = {}
    passed_on: list[Header] = []
    encodings: list[bytes] = []
    for header in headers:
        name = header[0].lower()
        if name == b"content-encoding":
            encodings.append(header[1].strip().lower())
        if name in _TO_US:
            to_us[name] = header[1]
        else:
            passed_on.append(header)
    named = to_us.get(b"connection", b"").lower()
    if named not in _PLAIN_CONNECTIONS:
        dropped = {word.strip() for word in named.split(b",")}
        passed_on = [header for header in passed_on if header[0].lower() not in dropped]
    is_chunked = b"transfer-encoding" in to_us
    length = None if is_chunked else int(to_us.get(b"content-length", b"0"))  # the parser has checked it
    queue = [to_us.get(name.encode()) for name in QUEUE_HEADERS]
    return ClientHead(
        http_target(method, path),
        RequestHead(method, path, passed_on, length),
        to_us,
        queue=tuple(None if value is None else value.decode("latin-1").strip() for value in queue),
        is_idempotent=to_us.get(IDEMPOTENT.encode(), b"").lower() == b"true",
        expects_continue=to_us.get(b"expect", b"").lower() == b"100-continue",
        encoding=inflating(encodings) if encodings else b"",
    )


class Answering(Protocol):
    """A request, as the log needs it."""

    target: Target
    identity: Identity | None

    @property
    def request_id(self) -> str: ...


class TenantRequests:
    """Those that are under way, whether they wait or were sent, by tenant."""

    def __init__(self, most: int) -> None:
        """`most`: of one tenant."""
        self._most = most
        self._of: dict[str, set[object]] = {}

    def enter(self, tenant: str, request: object) -> None:
        """Raises Problem tenant-requests."""
        known = self._of.setdefault(tenant, set())
        if len(known) >= self._most:
            raise Problem("tenant-requests", tenant=tenant, most=self._most)
        known.add(request)

    def leave(self, tenant: str, request: object) -> None:
        """May be called for a request that did not enter."""
        known = self._of.get(tenant, set())
        known.discard(request)
        if not known:
            self._of.pop(tenant, None)


class Plane:
    def __init__(
        self,
        *,
        callers: Callers,
        ids: Ids,
        on_request: Callable[[str, str, int, float], None],
        on_call: Callable[[str, str, float], None],
        fleet: Fleet,
        lanes: Lanes,
        most_body_bytes: int,
        most_waiting_bytes: int = USUAL_BYTES,
        tenant_requests: int = TENANT_REQUESTS,
        takes_files: bool = False,
        residencies: Residencies | None = None,
        audit: Audit,
        access_log: bool = False,
    ) -> None:
        """`takes_files`: a load of a model may bring files with it. `residencies`: of the servers with
        models in the ledger. `on_request`: method, route, status, seconds. `on_call`: method, code,
        seconds."""
        self.residencies = residencies
        self.ids = ids
        self._on_request = on_request
        self._on_call = on_call
        self._access_log = access_log
        self.takes_files = takes_files
        self.fleet = fleet
        self.lanes = lanes
        self.most_body_bytes = most_body_bytes
        self.requests = TenantRequests(tenant_requests)
        self.waiting_bytes = WaitingBytes(most_waiting_bytes, lanes.tenant_share)
        self._callers = callers
        self._audit = audit

    def answered(self, by: "Answering", method: str, status: int, seconds: float) -> None:
        """Over HTTP; 0 without an answer."""
        self._on_request(method, by.target.operation.name, status, seconds)
        self._log(by, method, status, seconds)

    def called(self, by: "Answering", status: str, seconds: float) -> None:
        """Over gRPC."""
        self._on_call(by.target.operation.name, status, seconds)
        self._log(by, "gRPC", status, seconds)

    def _log(self, by: "Answering", method: str, status: int | str, seconds: float) -> None:
        if self._access_log:
            caller = (None, None) if by.identity is None else (by.identity.name, by.identity.tenant)
            about = {"request": by.request_id, "model": by.target.model.decode(errors="replace")}
            log_answered(method, by.target.operation.name, status, seconds, *caller, **about)

    def check(self, head: ClientHead) -> Identity | None:
        """The identity of the token, if one is needed. Raises Problem."""
        identity, operation = None, head.target.operation
        self._callers.check_host(head.to_us.get(b"host", b""))
        if operation.scope is not None:
            authorization = head.to_us.get(b"authorization")
            identity = self.authorize(operation.scope, operation.name, authorization)
        if operation.shares_memory:
            raise no_shared_memory()
        if head.to_us.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            raise Problem("unsupported-media-type", "the only Transfer-Encoding that is read is chunked")
        if head.encoding and head.encoding not in ENCODINGS:
            raise bad_encoding(head.encoding)
        if head.body_bytes is not None:
            self.check_size(operation, head.body_bytes)
        return identity

    def authorize(self, scope: Scope, what: str, authorization: bytes | None) -> Identity:
        """The identity of the token, if it has that scope. Raises Problem."""
        identity = self._callers.identify(authorization)
        identity.require(scope, what)
        return identity

    async def note(self, target: Target, identity: Identity | None) -> None:
        """Write a load or an unload to the audit log, before it is carried out. Raises Problem."""
        if identity is None or not target.operation.is_audited:
            return
        subject = target.model.decode(errors="replace")[:100]
        action = "model.load" if target.operation.loads else "model.unload"
        try:
            await self._audit(by=identity.name, tenant=identity.tenant, action=action, subject=subject)
        except StoreUnavailable:
            raise Problem("store-unavailable") from None

    def has_left(self, model: str) -> bool:
        """As the ledger says; False where it is not the ledger's to say."""
        if self.residencies is None or not model or self.residencies.have(model):
            return False
        return not self.fleet.is_outside_ledger(model)

    def check_size(self, operation: Operation, body_bytes: int) -> None:
        """Raises Problem."""
        if body_bytes > self.most_body_bytes:
            raise body_too_large(
                f"a request to a model may have {self.most_body_bytes} bytes",
                body_bytes,
                "send less at once, or raise triton.body_bytes",
            )
        if self.reads_load(operation) and body_bytes > BUFFER_BYTES:
            raise body_too_large(
                f"a load without files may have {BUFFER_BYTES} bytes",
                body_bytes,
                "put files into the model repository, or have the operator set triton.load_files",
            )

    def reads_load(self, operation: Operation) -> bool:
        """The body is read, to see whether it brings files, before anything is sent."""
        return operation.loads and not self.takes_files


class _FileFound(Exception):
    pass


def brings_files(body: bytes) -> bool:
    """Whether the body of a load over HTTP brings files, or cannot be read. Triton has its own parser, for
    which another one of two equal names may count: so no name at all may be that of a file."""
    if not body:
        return False
    try:
        json.loads(body.decode("latin-1"), strict=False, object_pairs_hook=_refuse_files)
    except (ValueError, RecursionError, _FileFound):
        return True
    return False


def _refuse_files(pairs: list[tuple[str, object]]) -> None:
    if any(name.startswith("file:") for name, _ in pairs):
        raise _FileFound
