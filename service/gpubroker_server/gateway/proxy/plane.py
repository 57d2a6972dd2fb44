"""What all connections of the data plane share, and the decision what becomes of one request.

Everything that says whether, when and where a request goes is here.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from gpubroker_server.gateway.http.access import Callers
from gpubroker_server.gateway.http.identity import Identity, Scope
from gpubroker_server.gateway.http.ids import Ids
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.proxy.again import Again
from gpubroker_server.gateway.proxy.aims import Aim
from gpubroker_server.gateway.proxy.cold import Cold, Refusable
from gpubroker_server.gateway.proxy.fleet import IDEMPOTENT, Fleet
from gpubroker_server.gateway.proxy.lanes import MODEL_TYPE, PRIORITY, TIMEOUT, Lanes, Turn, Wish
from gpubroker_server.gateway.proxy.loads import MOST_READ_BYTES, brings_files
from gpubroker_server.gateway.proxy.refusals import no_files, no_shared_memory
from gpubroker_server.gateway.proxy.residency.residencies import Residencies
from gpubroker_server.gateway.proxy.room import USUAL_BYTES, Room
from gpubroker_server.ports.backends import Asking, Header, RequestHead

_PRIORITY = PRIORITY.encode()
_TIMEOUT = TIMEOUT.encode()
_MODEL_TYPE = MODEL_TYPE.encode()
_WISHES = (_PRIORITY, _TIMEOUT, _MODEL_TYPE)
_TO_US = frozenset(
    {
        IDEMPOTENT.encode(),
        _PRIORITY,
        _TIMEOUT,
        _MODEL_TYPE,
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
"""Headers that concern the client's connection, or are for us. All others are passed on as they came."""

_PLAIN_CONNECTIONS = frozenset({b"", b"close", b"keep-alive"})


class OnRequest(Protocol):
    def __call__(self, method: str, route: str, status: int, seconds: float) -> None: ...


class OnCall(Protocol):
    def __call__(self, method: str, code: str, seconds: float) -> None: ...


class Told(NamedTuple):
    """A request's headers, sorted by whom they are for."""

    to_us: Mapping[bytes, bytes]
    """By lowercase name."""
    passed_on: Sequence[Header]
    body_bytes: int | None
    """None: it comes in chunks, and nobody knows before its end. The parser has seen to the text."""


def sorted_out(headers: Sequence[Header]) -> Told:
    to_us: dict[bytes, bytes] = {}
    passed_on: list[Header] = []
    for header in headers:
        name = header[0].lower()
        if name in _TO_US:
            to_us[name] = header[1]
        else:
            passed_on.append(header)
    named = to_us.get(b"connection", b"").lower()
    if named not in _PLAIN_CONNECTIONS:
        dropped = {word.strip() for word in named.split(b",")}
        passed_on = [header for header in passed_on if header[0].lower() not in dropped]
    if b"transfer-encoding" in to_us:
        return Told(to_us, passed_on, None)
    return Told(to_us, passed_on, int(to_us.get(b"content-length", b"0")))


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1").strip()


class Plane:
    def __init__(
        self,
        *,
        callers: Callers,
        ids: Ids,
        on_request: OnRequest,
        on_call: OnCall,
        fleet: Fleet,
        lanes: Lanes,
        most_body_bytes: int,
        most_waiting_bytes: int = USUAL_BYTES,
        takes_files: bool = False,
        residencies: Residencies | None = None,
    ) -> None:
        """`takes_files`: a load of a model may bring files with it. `residencies`: of the servers whose
        models are held in the ledger."""
        self._residencies = residencies
        self.ids = ids
        self.on_request = on_request
        self.on_call = on_call
        self.takes_files = takes_files
        self.fleet = fleet
        self.lanes = lanes
        self.most_body_bytes = most_body_bytes
        self.room = Room(most_waiting_bytes, lanes.tenant_share)
        self._callers = callers

    def check(self, aim: Aim, told: Told) -> Identity | None:
        """Whoever asks may ask this: who that is, if it matters. Raises Problem."""
        identity = None
        self._callers.check_host(told.to_us.get(b"host", b""))
        if aim.scope is not None:
            identity = self.authorize(aim.scope, aim.route, told.to_us.get(b"authorization"))
        if aim.shares_memory:
            raise no_shared_memory()
        if told.to_us.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            raise Problem("unsupported-media-type", "the only Transfer-Encoding that is read is chunked")
        if told.body_bytes is not None:
            self.check_size(aim, told.body_bytes)
        return identity

    def authorize(self, scope: Scope, what: str, authorization: bytes | None) -> Identity:
        """Whose token it is, if it allows that. Raises Problem."""
        identity = self._callers.identify(authorization)
        self.check_scope(identity, scope, what)
        return identity

    def check_scope(self, identity: Identity, scope: Scope, what: str) -> None:
        """Raises Problem."""
        if not identity.may(scope):
            raise Problem(
                "forbidden",
                f'token "{identity.name}" lacks the scope {scope}, which {what} needs; '
                "ask an admin for a token that has it",
            )

    def check_size(self, aim: Aim, body_bytes: int) -> None:
        """Raises Problem."""
        if body_bytes > self.most_body_bytes:
            raise Problem(
                "payload-too-large",
                f"a request to a model may have {self.most_body_bytes} bytes and this one has "
                f"{body_bytes} or more; send less at once, or raise triton.body_bytes",
            )
        if self.reads(aim) and body_bytes > MOST_READ_BYTES:
            raise Problem(
                "payload-too-large",
                f"a load without files may have {MOST_READ_BYTES} bytes and this one has {body_bytes} or "
                "more; put files into the model repository, or have the operator set triton.load_files",
            )

    def reads(self, aim: Aim) -> bool:
        """The body must be there, and looked into, before anything is sent."""
        return aim.loads and not self.takes_files

    def check_load(self, body: bytes) -> None:
        """Raises Problem."""
        if brings_files(body):
            raise no_files()

    def send(
        self, head: RequestHead, answer: Refusable, aim: Aim, told: Told, who: Identity | None
    ) -> Asking:
        """At once, or once the model is there and has a slot for it. Raises Problem."""

        def ask(to: Refusable = answer) -> Asking:
            return self.fleet.ask(head, to, aim, told.to_us)

        if who is None or not (aim.takes_slot or aim.needs_model or aim.unloads):
            return ask()
        wish = self.lanes.wish_in(who, *(_text(told.to_us.get(name)) for name in _WISHES))
        model = aim.model.decode(errors="replace")
        there = self.wait_for(model, wish.priority, unloads=aim.unloads)
        if not aim.takes_slot:
            return ask() if there is None else Cold(there, ask, answer, self.room, who.tenant)

        send = ask
        if self._residencies is not None and not aim.is_encoded:
            send = partial(self._send_again, ask, answer, aim, who, wish)
        if there is not None:
            return Cold(self._in_turn(answer, aim, who, wish, there), send, answer, self.room, who.tenant)
        answer.turn = turn = self.lanes.enter(aim.model, who, wish)
        if turn.waits:
            return Cold(self._in_turn(answer, aim, who, wish, turn=turn), send, answer, self.room, who.tenant)
        return send()

    def _send_again(
        self, ask: Callable[[Refusable], Asking], answer: Refusable, aim: Aim, who: Identity, wish: Wish
    ) -> Asking:
        """For as long as its model is not there, though it should be."""
        model = aim.model.decode(errors="replace")

        async def back() -> None:
            if answer.turn is not None:
                answer.turn.leave()
            server = "" if answer.server is None else answer.server.name
            await self._in_turn(answer, aim, who, wish, self.back(model, wish.priority, server))

        def doubt() -> None:
            self.doubt(model, "" if answer.server is None else answer.server.name)

        return Again(ask, answer, lambda: self.is_there(model), back, doubt)

    @property
    def holds_models(self) -> bool:
        """Whether the ledger has the models of any server."""
        return self._residencies is not None

    def wait_for(self, model: str, priority: int | None, *, unloads: bool) -> Awaitable[bool] | None:
        """Until it is there, or gone; None if there is nothing to wait for. When awaited False if no server
        has such a model; raises Problem."""
        residencies = self._residencies
        if residencies is None:
            return None
        if unloads:
            return residencies.unloaded(model)
        return None if self.fleet.is_outside(model) else residencies.wait_for(model, priority)

    def coming(self, model: str, priority: int | None) -> Awaitable[bool] | None:
        """The same for one that has been asked for already, and may have left since."""
        residencies = self._residencies
        if residencies is None or self.fleet.is_outside(model):
            return None
        return residencies.coming(model, priority)

    def is_there(self, model: str) -> bool:
        """Held in the ledger, and as far as the picture goes in memory."""
        return self._residencies is not None and self._residencies.have(model)

    def back(self, model: str, priority: int | None, server: str) -> Awaitable[bool]:
        """The same for one that this server does not have, though it `is_there`."""
        assert self._residencies is not None
        return self._residencies.back(model, priority, server)

    def doubt(self, model: str, server: str) -> None:
        """It has answered as one does whose process is gone."""
        if self._residencies is not None:
            self._residencies.doubt(model, server)

    async def _in_turn(
        self,
        answer: Refusable,
        aim: Aim,
        who: Identity,
        wish: Wish,
        there: Awaitable[bool] | None = None,
        turn: Turn | None = None,
    ) -> None:
        """Until the model is there and has a slot for it, both at once: while it waits for the one it may
        lose the other. Raises Problem."""
        model = aim.model.decode(errors="replace")
        is_known = True
        while True:
            if there is not None:
                is_known = await there
            if turn is None:
                answer.turn = turn = self.lanes.enter(aim.model, who, wish)
            await turn.granted()
            if not is_known or (there := self.coming(model, wish.priority)) is None:
                return
            turn.leave()
            turn = None
