"""Event streams: server-sent events, of the log as it is kept and then of each commit."""

import asyncio
from collections.abc import AsyncIterator, Container, Iterable, Iterator, Sequence
from typing import Final

from gpubroker.wire.answered import encode
from gpubroker.wire.events import StreamEnd
from gpubroker.wire.tasks import TaskState as ShownState
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from gpubroker_server.core.domain.task import TERMINAL
from gpubroker_server.core.domain.units import Position, Seconds, TaskId
from gpubroker_server.core.world.events import Event
from gpubroker_server.gateway.events.selection import (
    LabelledTasks,
    Selection,
    hidden_tasks,
    names_another_task,
)
from gpubroker_server.gateway.events.showing import bookmark, message
from gpubroker_server.gateway.parts import AppParts
from gpubroker_server.gateway.status.wholes import Whole, standing_of
from gpubroker_server.http.answering import ClientStalled
from gpubroker_server.http.subscriptions import Arrival, Subscription
from gpubroker_server.ports.store import StoreUnavailable, TaskRecord

EVENT_STREAM: Final = "text/event-stream"

BEAT_SECONDS: Final = Seconds(15.0)
"""The time between two heartbeats. Proxies usually close connections that are silent for 60 s."""
PACE_SECONDS: Final = Seconds(0.02)
"""The shortest time between two sends of new events to one client. If commits are more frequent, each send
has the events of several: most of the cost is per send."""
STALL_SECONDS: Final = Seconds(10.0)
"""The time after which a client that takes nothing is disconnected."""

_PAGE_EVENTS: Final = 200
_CHUNK_BYTES: Final = 64 * 1024
_RETRY: Final = b"retry: 3000\n\n"
"""Tells browsers to connect again 3 s after a stream has broken off."""
_HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Headers with which caches keep nothing, and nginx passes the stream on as it comes."""
_ENDS: Final = frozenset(f"task.{state}" for state in TERMINAL)


class Followed:
    """A task, an array or a worker set whose events are streamed until it has ended."""

    def __init__(self, record: TaskRecord, whole: Whole | None) -> None:
        self.record = record
        self.whole = whole
        self.tasks: tuple[TaskId, ...] = (record.task.id,) if whole is None else whole.workers
        self._left = set(self.tasks)
        """The tasks that have not ended."""

    @property
    def is_over(self) -> bool:
        return not self._left

    async def read_states(self, parts: AppParts) -> None:
        """Read which tasks have ended. Read the log afterwards: it then has the events of their ends."""
        states = await parts.records.store.states(self.tasks)
        self._left = {task for task, row in states.items() if not row.state.is_terminal}

    def note(self, event: Event) -> None:
        if event.kind in _ENDS:
            self._left.discard(TaskId(event.key))

    async def end(self, parts: AppParts) -> bytes:
        """Return the last message of the stream."""
        store, task = parts.records.store, self.record.task
        if self.whole is not None:
            state = (await standing_of(store, self.whole)).state
        else:
            record = await store.record(task.id)
            state = (record or self.record).task.state
        return b"event: end\ndata: %b\n\n" % encode(StreamEnd(task.id, ShownState(state)))


class EventStream:
    """The text of one stream."""

    def __init__(
        self,
        parts: AppParts,
        selection: Selection,
        labelled: LabelledTasks,
        subscription: Subscription,
        secret: str,
        followed: Followed | None,
    ) -> None:
        """`secret` is that of the token, which is checked again with each heartbeat."""
        self._parts = parts
        self._selection = selection
        self._labelled = labelled
        self._subscription = subscription
        self._secret = secret
        self._followed = followed
        self._at = Position(0)
        """The position up to which the client has all events."""
        self._is_cut = False
        """True if the stream cannot go on: the token is no longer valid or has other rights, or events that
        the client lacks are not kept any more. The client learns the reason when it connects again."""

    async def text(self, newest: Sequence[Event], start: Position) -> AsyncIterator[bytes]:
        """Yield the messages: those of the `newest` events, then those of all events after `start`."""
        yield _RETRY
        async for chunk in self._messages([Arrival(event) for event in newest]):
            yield chunk
        self._at = start
        try:
            while not self._is_done:
                async for chunk in self._log():
                    yield chunk
                async for chunk in self._news():
                    yield chunk
        except StoreUnavailable:
            return  # The client connects again, and is told so.
        if self._followed is not None and self._followed.is_over and self._is_whole:
            yield await self._followed.end(self._parts)

    @property
    def _is_done(self) -> bool:
        is_over = self._followed is not None and self._followed.is_over
        return is_over or not self._is_whole

    @property
    def _is_whole(self) -> bool:
        """False if the stream must end although the client lacks events."""
        return not (self._is_cut or self._subscription.is_ended)

    async def _log(self) -> AsyncIterator[bytes]:
        """Yield what the log has, and have new events queued from then on.

        The second reading finds what was committed during the first. Events that are both read and queued
        are sent once.
        """
        async for chunk in self._pages():
            yield chunk
        self._subscription.attach()
        attached_at = self._parts.world.position
        if self._followed is not None:
            await self._followed.read_states(self._parts)
        async for chunk in self._pages():
            yield chunk
        if self._is_whole:
            self._at = max(self._at, attached_at)
            yield bookmark(self._at)

    async def _pages(self) -> AsyncIterator[bytes]:
        """Yield the events after `_at`, page by page as the client takes them."""
        store, is_last = self._parts.records.store, False
        while self._is_whole and not is_last:
            events = await store.events(self._at, _PAGE_EVENTS, self._selection.tasks)
            is_last = len(events) < _PAGE_EVENTS
            if self._at and self._at < await store.oldest() - 1:
                self._is_cut = True
                return
            chunk = b""
            async for chunk in self._messages([Arrival(event) for event in events]):
                yield chunk
            if events:
                self._at = events[-1].position
            if not chunk and not is_last:
                yield bookmark(self._at)

    async def _news(self) -> AsyncIterator[bytes]:
        """Yield what is committed from now on, until the stream is done, or more was committed than is
        queued."""
        subscription, now = self._subscription, asyncio.get_running_loop().time
        beat_at, next_at = now() + BEAT_SECONDS, 0.0
        while not (self._is_done or subscription.is_behind):
            arrivals, position = subscription.take(), self._parts.world.position
            fresh = [arrival for arrival in arrivals if arrival.event.position > self._at]
            async for chunk in self._messages(fresh):
                yield chunk
                next_at = now() + PACE_SECONDS
            self._at = max(self._at, position)
            if now() >= beat_at:
                beat_at = now() + BEAT_SECONDS
                holder = self._parts.tokens.identify(self._secret)
                self._is_cut = holder != self._selection.identity
                yield bookmark(self._at)
            if not self._is_done:
                await subscription.has_news(Seconds(beat_at - now()))
                if now() < next_at:
                    await asyncio.sleep(next_at - now())

    async def _messages(self, arrivals: Sequence[Arrival]) -> AsyncIterator[bytes]:
        """Yield the messages of the events that the stream has, in chunks. Between two chunks other requests
        have their turn."""
        if self._followed is not None:
            for arrival in arrivals:
                self._followed.note(arrival.event)
        selected = [arrival for arrival in arrivals if self._selection.wants(arrival.event)]
        events = [arrival.event for arrival in selected]
        labelled = await self._labelled.of(events)
        if len(labelled) < len(events):
            kept = {event.position for event in labelled}
            selected = [arrival for arrival in selected if arrival.event.position in kept]
        hidden = await hidden_tasks(self._parts.records.store, self._selection.identity, labelled)
        for number, chunk in enumerate(_chunks(_text_of(arrival, hidden) for arrival in selected)):
            if number:
                await asyncio.sleep(0)
            yield chunk


def _text_of(arrival: Arrival, hidden: Container[str]) -> bytes:
    """Return the message of an event. Streams share the text, unless it depends on the token."""
    if names_another_task(arrival.event):
        return message(arrival.event, hidden)
    if arrival.text is None:
        arrival.text = message(arrival.event)
    return arrival.text


def _chunks(texts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the texts joined to chunks of about `_CHUNK_BYTES`."""
    joined: list[bytes] = []
    size_bytes = 0
    for text in texts:
        joined.append(text)
        size_bytes += len(text)
        if size_bytes >= _CHUNK_BYTES:
            yield b"".join(joined)
            joined, size_bytes = [], 0
    if joined:
        yield b"".join(joined)


class EventStreamResponse(StreamingResponse):
    """The answer with a stream. It closes the subscription at its end, and disconnects a client that takes
    nothing for `STALL_SECONDS`."""

    def __init__(self, text: AsyncIterator[bytes], subscription: Subscription) -> None:
        super().__init__(text, 200, _HEADERS, EVENT_STREAM)
        self._subscription = subscription

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(sent: Message) -> None:
            try:
                async with asyncio.timeout(STALL_SECONDS):
                    await send(sent)
            except TimeoutError:
                raise ClientStalled from None

        try:
            await super().__call__(scope, receive, send_in_time)
        finally:
            self._subscription.close()
