"""Events as answers show them."""

from collections.abc import Container
from typing import Any

from gpubroker.wire.answered import Time, encode
from gpubroker.wire.events import Event as ShownEvent

from gpubroker_server.core.domain.units import Instant, Position
from gpubroker_server.core.world.events import Event
from gpubroker_server.http.times import rfc3339


def shown(event: Event, hidden: Container[str]) -> ShownEvent:
    """Return an event as answers show it. `hidden` are the tasks that must not be named."""
    fields = {
        name: None if name == "freeing_for" and value in hidden else _readable(name, value)
        for name, value in event.fields.items()
    }
    return ShownEvent(event.position, Time.at(event.at), event.kind, event.key, event.version, fields)


def _readable(name: str, value: Any) -> Any:
    """Return the value of a field as answers show it. Times are seconds in rows, and RFC 3339 in answers. The
    last column of a rank is left out: it names the task for which the rank made room, which may belong to
    another tenant."""
    if name == "members":
        return [row[:5] for row in value]
    is_time = name.endswith("_at") or name in {"since", "not_before"}
    return rfc3339(Instant(value)) if is_time and isinstance(value, int | float) else value


def message(event: Event, hidden: Container[str] = ()) -> bytes:
    """Return an event as a message of a stream. The id of the message is the position of the event."""
    data = encode(shown(event, hidden))
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (event.position, event.kind.encode(), data)


def bookmark(position: Position) -> bytes:
    """Return a comment that keeps a stream open, with an id: the client has all events up to this position.
    Clients hand out no message for it, because it has no data."""
    return b": heartbeat\nid: %d\n\n" % position
