"""State that all connections of the data plane share: tokens, limits, counters, servers, lanes and models."""

from collections.abc import Callable, Iterable
from typing import Final, Protocol

from gpubroker_server.http.identity import Callers, Identity, Scope
from gpubroker_server.http.ids import Ids
from gpubroker_server.http.problems import Problem
from gpubroker_server.http.proxies import TrustedProxies
from gpubroker_server.inference.body_buffer import WaitingBytes
from gpubroker_server.inference.lanes import MODEL_TYPE, PRIORITY, TIMEOUT, Lanes
from gpubroker_server.inference.operation import Target
from gpubroker_server.inference.refusals import bad_header
from gpubroker_server.inference.server_choice import Residencies
from gpubroker_server.inference.servers import Fleet
from gpubroker_server.ports.store import StoreUnavailable
from gpubroker_server.telemetry.logs import log_answered

IDEMPOTENT: Final = "x-idempotent"
"""Header with which a client says, by the value `true`, that the request may be carried out twice. Such a
request may go to a second server when the first one breaks off."""

QUEUE_HEADERS: Final = (PRIORITY, TIMEOUT, MODEL_TYPE)
"""Headers in which a request states the place that it wants in its model's lane."""


def idempotent_in(text: str) -> bool:
    """Return what the header IDEMPOTENT says. Raises Problem header-invalid for anything but true and
    false."""
    if (word := text.strip().lower()) not in ("true", "false"):
        raise bad_header(IDEMPOTENT, text, "write true or false")
    return word == "true"


class Audit(Protocol):
    async def __call__(self, *, by: str, tenant: str, action: str, subject: str) -> None:
        """Write one line into the audit log. Raises StoreUnavailable."""


class LoggedRequest(Protocol):
    """The facts of a request that its line in the log names."""

    target: Target
    identity: Identity | None

    @property
    def request_id(self) -> str: ...

    def origin(self) -> tuple[str, Iterable[bytes]]:
        """Return the address at the other end of the connection, and the values of the header
        X-Forwarded-For."""
        ...


class TenantRequests:
    """The requests of each tenant that are under way, whether they wait or were sent."""

    def __init__(self, most: int) -> None:
        """`most` is the number of requests that one tenant may have under way."""
        self._most = most
        self._of: dict[str, set[object]] = {}

    def enter(self, tenant: str, request: object) -> None:
        """Count a request of the tenant. Raises Problem tenant-requests if it has too many."""
        under_way = self._of.setdefault(tenant, set())
        if len(under_way) >= self._most:
            raise Problem("tenant-requests", tenant=tenant, most=self._most)
        under_way.add(request)

    def leave(self, tenant: str, request: object) -> None:
        """Stop counting a request. Does nothing for a request that did not enter."""
        under_way = self._of.get(tenant, set())
        under_way.discard(request)
        if not under_way:
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
        most_waiting_bytes: int,
        tenant_requests: int,
        takes_files: bool = False,
        residencies: Residencies | None = None,
        audit: Audit,
        access_log: bool = False,
        proxies: TrustedProxies | None = None,
    ) -> None:
        """`takes_files` is True if a load of a model may bring files. `residencies` are the models of the
        servers that the ledger manages. `on_request` gets method, route, status and seconds; `on_call` gets
        method, code and seconds."""
        self.residencies = residencies
        self.ids = ids
        self._on_request = on_request
        self._on_call = on_call
        self._access_log = access_log
        self._proxies = proxies or TrustedProxies()
        self.takes_files = takes_files
        self.fleet = fleet
        self.lanes = lanes
        self.most_body_bytes = most_body_bytes
        self.requests = TenantRequests(tenant_requests)
        self.waiting_bytes = WaitingBytes(most_waiting_bytes, lanes.tenant_share)
        self.callers = callers
        self._audit = audit

    def answered(self, by: "LoggedRequest", method: str, status: int, seconds: float) -> None:
        """Count and log a request over HTTP. The status of a request without an answer is 0."""
        self._on_request(method, by.target.operation.name, status, seconds)
        self._log(by, method, status, seconds)

    def called(self, by: "LoggedRequest", status: str, seconds: float) -> None:
        """Count and log a call over gRPC."""
        self._on_call(by.target.operation.name, status, seconds)
        self._log(by, "gRPC", status, seconds)

    def _log(self, by: "LoggedRequest", method: str, status: int | str, seconds: float) -> None:
        if self._access_log:
            caller = (None, None) if by.identity is None else (by.identity.name, by.identity.tenant)
            about = {"request": by.request_id, "model": by.target.model.decode(errors="replace")}
            about["client"] = self._proxies.client_of(*by.origin())
            log_answered(method, by.target.operation.name, status, seconds, *caller, **about)

    def authorize(self, scope: Scope, what: str, authorization: bytes | None) -> Identity:
        """Return the identity of the token. Raises Problem if there is no valid token, or the token lacks the
        scope."""
        identity = self.callers.identify(authorization)
        identity.require(scope, what)
        return identity

    async def note(self, target: Target, identity: Identity | None) -> None:
        """Write a load or an unload to the audit log, before it is carried out. Raises Problem if the log
        cannot be written: then nothing is carried out."""
        if identity is None or not target.operation.is_audited:
            return
        subject = target.model.decode(errors="replace")[:100]
        action = "model.load" if target.operation.loads else "model.unload"
        try:
            await self._audit(by=identity.name, tenant=identity.tenant, action=action, subject=subject)
        except StoreUnavailable:
            raise Problem("store-unavailable") from None

    def has_left(self, model: str, *, over_grpc: bool) -> bool:
        """Return True if the ledger manages this model and has unloaded it, and no server outside the ledger
        that answers over the request's protocol has it."""
        if self.residencies is None or not model or self.residencies.have(model):
            return False
        return not self.fleet.is_outside_ledger(model, over_grpc=over_grpc)
