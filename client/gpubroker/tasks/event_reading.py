"""Follows the event log through lost connections: a stream of server-sent events, resumed at its last id."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

from gpubroker.errors import BrokerError, Unreachable
from gpubroker.tasks.task import AnyTask
from gpubroker.transport.breaks import Breaks
from gpubroker.transport.decoding import decode
from gpubroker.transport.exchange import Call, Pause, Steps
from gpubroker.transport.operations import Reading
from gpubroker.wire.events import Event

_ACCEPT = "text/event-stream"
_SILENCE_SECONDS = 45.0
"""The longest silence of a stream that is alive: three heartbeats."""
_TEMPORARY = frozenset({429, 502, 503, 504})
_POLL_SECONDS = 0.5
"""The time between two requests to a service of an earlier release, which has pages but no streams."""


class EventOptions(TypedDict, total=False):
    """Selects events of the log, and where to begin: at `after` or at `last`."""

    after: int
    """The position after which to begin."""
    last: int
    """The number of the newest events with which to begin, up to 500; 0: with what is yet to come."""
    kind: str | Sequence[str]
    """Kinds such as `task.failed`, or `task.*` for all of a subject."""
    tasks: Sequence[AnyTask]
    """Tasks, arrays and worker sets. Not for the events of a single one."""
    labels: Mapping[str, str]
    """Labels of the task, all of which must match. Not for the events of a single task."""
    tenant: str
    """The tenant: another one, or `*` for all, needs the scope admin. Not for the events of a single task."""


class EventReading(Reading[Event]):
    """Reads a stream of events, and begins another one after the last event if it breaks off. Raises what
    `next_call` raises, and Refused with the code events-gone if the service no longer keeps the events after
    the last one that was read."""

    def __init__(
        self, find: Callable[[], Steps[tuple[str, Mapping[str, Any]]]], retry_seconds: float
    ) -> None:
        """`find` returns the path of the events, and the parameters that select them."""
        self._find = find
        self._found: tuple[str, Mapping[str, Any]] | None = None
        self._breaks = Breaks(retry_seconds)
        self._fault: BrokerError | None = None
        self._at: int | None = None
        """The position up to which all events were read; None if that is not known yet."""
        self._begun = b""
        """The start of a message that has not ended."""
        self._is_over = self._has_news = self._is_page = False

    def next_call(self) -> Steps[Call | None]:
        if self._is_over:
            return None
        self._found = self._found or (yield from self._find())
        yield from self._breaks.pause(
            f"the events after position {self._at or 0} cannot be read", self._fault
        )
        if self._is_page and not self._has_news:
            yield Pause(_POLL_SECONDS)
        path, params = self._found
        headers = {"Accept": _ACCEPT}
        if self._at is not None:
            # An earlier release knows only the parameter.
            headers["Last-Event-ID"] = str(self._at)
            params = {**{name: given for name, given in params.items() if name != "last"}, "after": self._at}
        self._begun, self._fault, self._has_news, self._is_page = b"", None, False, False
        self._breaks.note_call()
        return Call("GET", path, params, headers=headers, patience_seconds=_SILENCE_SECONDS)

    def take(self, data: bytes) -> Iterator[Event]:
        self._is_page = self._is_page or (not self._begun and not self._has_news and data.startswith(b"{"))
        if self._is_page:
            self._begun += data
            return
        *whole, self._begun = (self._begun + data).split(b"\n\n")
        for message in whole:
            yield from self._read(message.decode())

    def _read(self, message: str) -> Iterator[Event]:
        fields: dict[str, str] = {}
        for line in message.split("\n"):
            name, _, value = line.partition(": ")
            fields[name] = value
        self._has_news = self._has_news or "data" in fields
        if fields.get("event") == "end":
            self._is_over = True
            return
        if fields.get("id", "").isdigit():
            self._at = int(fields["id"])
        if "data" in fields:
            yield decode(Event, json.loads(fields["data"]))

    def refused(self, error: BrokerError) -> None:
        if error.status not in _TEMPORARY:
            raise error
        self._fault = error
        self._breaks.note_end(is_broken=True, has_news=False)

    def end(self, fault: Unreachable | None) -> Iterable[Event]:
        """Return the events of the page, if the service is of an earlier release. A message that was broken
        off is dropped: the next stream has it again."""
        self._fault = fault
        if not self._is_page or fault is not None:
            self._breaks.note_end(is_broken=True, has_news=self._has_news)
            return ()
        page = json.loads(self._begun)
        self._at, self._has_news = page["next_after"], bool(page["items"])
        self._breaks.note_end(is_broken=False, has_news=True)
        return [decode(Event, item) for item in page["items"]]
