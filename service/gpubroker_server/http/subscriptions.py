"""The open event streams of a gateway. Each has a queue of the events that it is still to send, which the
reader of the event log fills."""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from typing import Final

from gpubroker_server.core.domain.units import Seconds, TaskId
from gpubroker_server.core.world.events import Event, task_of
from gpubroker_server.http.problems import Problem

MAX_QUEUED: Final = 5_000
"""The most events in the queue of one stream. A stream with more to send reads the log instead."""

_EVERY_EVENT: Final = object()
"""The key in the index of subscriptions to the events of all tasks and tenants."""


class Arrival:
    """A committed event, and the text that all streams send of it once one of them has made the text."""

    __slots__ = ("event", "text")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.text: bytes | None = None


class Subscription:
    """One event stream: the events that it wants, and those of them that it is still to send."""

    def __init__(
        self,
        hub: "Subscriptions",
        token: str,
        wants: Callable[[Event], bool],
        *,
        tasks: Iterable[TaskId] | None = None,
        tenants: Iterable[str] | None = None,
    ) -> None:
        """`wants` selects among the events of `tasks`, or else of `tenants`, or else among all events."""
        self.token = token
        self.wants = wants
        self.keys: tuple[Hashable, ...] = (_EVERY_EVENT,)
        if tasks is not None:
            self.keys = tuple(_key_of_task(task) for task in tasks)
        elif tenants is not None:
            self.keys = tuple(_key_of_tenant(tenant) for tenant in tenants)
        self.is_ended = False
        """True if the stream must end, because the process does or has missed events."""
        self._hub = hub
        self._queue: deque[Arrival] = deque()
        self._has_news = asyncio.Event()
        self._is_attached = False

    @property
    def is_behind(self) -> bool:
        """True if the queue does not get the new events, so that the stream must read the log: before
        `attach`, and after more events came than the queue may have."""
        return not self._is_attached

    def attach(self) -> None:
        """Have new events put into the queue, from the next commit on."""
        if not self._is_attached:
            self._is_attached = True
            self._hub.index(self)

    def close(self) -> None:
        """End the subscription. Closing it again does nothing."""
        self._detach()
        self._hub.forget(self)

    def end(self) -> None:
        """Have the stream end."""
        self.is_ended = True
        self._has_news.set()

    def add(self, arrival: Arrival) -> None:
        self._queue.append(arrival)
        self._has_news.set()

    def take(self) -> Sequence[Arrival]:
        """Return the events in the queue, which is empty afterwards."""
        taken, self._queue = self._queue, deque()
        if not self.is_ended:
            self._has_news.clear()
        return taken

    async def has_news(self, seconds: Seconds) -> None:
        """Wait until there is something in the queue, or the stream must end or read the log, for at most
        `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._has_news.wait()

    @property
    def is_full(self) -> bool:
        return len(self._queue) > MAX_QUEUED

    def drop_queue(self) -> None:
        """Stop queueing and drop the queue. The stream then reads the same events from the log."""
        self._detach()
        self._has_news.set()

    def _detach(self) -> None:
        self._queue.clear()
        if self._is_attached:
            self._is_attached = False
            self._hub.unindex(self)


class Subscriptions:
    """All open event streams of this process. Call `on_events` on the thread of the event loop."""

    def __init__(self, most: int, most_of_a_token: int) -> None:
        self._most, self._most_of_a_token = most, most_of_a_token
        self._open: set[Subscription] = set()
        self._of_tokens: Counter[str] = Counter()
        """Token -> the number of its open streams."""
        self._by_key: dict[Hashable, dict[Subscription, None]] = {}
        """Task, tenant or every event -> the attached subscriptions."""
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._open)

    def open(
        self,
        token: str,
        wants: Callable[[Event], bool],
        *,
        tasks: Iterable[TaskId] | None = None,
        tenants: Iterable[str] | None = None,
    ) -> Subscription:
        """Return a new subscription, with the arguments of Subscription, for a stream that has yet to read
        the log. Raises Problem event-streams-full."""
        of_token = self._of_tokens[token]
        if of_token >= self._most_of_a_token:
            raise Problem(
                "event-streams-full",
                f'token "{token}" has {of_token} event streams open at this gateway, and may have '
                f"{self._most_of_a_token} (limits.token_event_streams); close some, or follow several tasks "
                "with one stream (GET /events?task=)",
            )
        if len(self._open) >= self._most:
            raise Problem(
                "event-streams-full",
                f"{len(self._open)} event streams are open at this gateway, as many as may be "
                "(limits.event_streams); connect again later, or to another gateway",
            )
        subscription = Subscription(self, token, wants, tasks=tasks, tenants=tenants)
        self._open.add(subscription)
        self._of_tokens[token] += 1
        if self._is_closed:
            subscription.end()
        return subscription

    def forget(self, subscription: Subscription) -> None:
        if subscription in self._open:
            self._open.remove(subscription)
            self._of_tokens[subscription.token] -= 1
            if not self._of_tokens[subscription.token]:
                del self._of_tokens[subscription.token]

    def index(self, subscription: Subscription) -> None:
        for key in subscription.keys:
            self._by_key.setdefault(key, {})[subscription] = None

    def unindex(self, subscription: Subscription) -> None:
        for key in subscription.keys:
            others = self._by_key.get(key, {})
            others.pop(subscription, None)
            if not others:
                self._by_key.pop(key, None)

    def on_events(self, events: Sequence[Event]) -> None:
        """Queue these committed events for the streams that want them. Apply the events to the World
        first."""
        if not self._by_key:
            return
        full: set[Subscription] = set()
        for event in events:
            arrival: Arrival | None = None
            for subscription in self._subscribers_of(event):
                if subscription.wants(event):
                    arrival = arrival or Arrival(event)
                    subscription.add(arrival)
                    if subscription.is_full:
                        full.add(subscription)
        for subscription in full:
            subscription.drop_queue()

    def _subscribers_of(self, event: Event) -> Iterable[Subscription]:
        task, by_key = task_of(event), self._by_key
        return chain(
            () if task is None else by_key.get(_key_of_task(task), ()),
            by_key.get(_key_of_tenant(event.tenant), ()),
            by_key.get(_EVERY_EVENT, ()),
        )

    def end_all(self) -> None:
        """Have all open streams end, because this process has missed events. Clients connect again and read
        on where they stopped."""
        for subscription in self._open:
            subscription.end()

    def close(self) -> None:
        """Have all streams end, and later ones as soon as they have begun."""
        self._is_closed = True
        self.end_all()


def _key_of_task(task: TaskId) -> Hashable:
    return "task", task


def _key_of_tenant(tenant: str) -> Hashable:
    return "tenant", tenant
