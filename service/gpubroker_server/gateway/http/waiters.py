"""Those who wait: for the end of a task, or for the leader to carry out a request. The log wakes them."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from gpubroker_server.core.domain.task import TERMINAL
from gpubroker_server.core.domain.units import Position, Seconds
from gpubroker_server.core.world.events import Event

_WAKING = frozenset({*(f"task.{state}" for state in TERMINAL), "request.done"})
"""Kinds of events that somebody may wait for. The key is the task's or the request's id."""


_MOVES = _WAKING - {"request.done"} | {"task.started", "task.stopping"}


def moves_of(task: str) -> str:
    """The key for whoever waits for a task's next move, whether it is its last or not."""
    return f"{task} moves"


class Expectation:
    """One client's wait for one key. Made before the row is read, so that no end falls in between."""

    def __init__(self) -> None:
        self._happened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fulfil(self) -> None:
        if not self._happened.done():
            self._happened.set_result(None)

    async def within(self, seconds: Seconds) -> bool:
        """True once it happened; False if the time ran out first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._happened
        return self._happened.done() and not self._happened.cancelled()


class Waiters:
    """All expectations by key. Lives on the event loop; `on_events` must be called on its thread."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[Expectation]] = {}
        self._behind: dict[Expectation, Position] = {}
        """Who waits for the log to be heard up to a position."""
        self.is_closed = False
        """Nobody waits any more: this process is about to end."""

    def __len__(self) -> int:
        return sum(len(expectations) for expectations in self._waiting.values())

    @contextlib.contextmanager
    def expect(self, key: str) -> Iterator[Expectation]:
        expectation = self._new()
        self._waiting.setdefault(key, set()).add(expectation)
        try:
            yield expectation
        finally:
            others = self._waiting.get(key, set())
            others.discard(expectation)
            if not others:
                self._waiting.pop(key, None)

    @contextlib.contextmanager
    def behind(self, position: Position) -> Iterator[Expectation]:
        expectation = self._new()
        self._behind[expectation] = position
        try:
            yield expectation
        finally:
            del self._behind[expectation]

    def on_events(self, events: Sequence[Event]) -> None:
        """Wake whoever waits for what these committed events say; the World must have heard them before."""
        for expectation, position in self._behind.items():
            if events and events[-1].position >= position:
                expectation.fulfil()
        if not self._waiting:
            return
        for event in events:
            if event.kind in _WAKING:
                self._fulfil(event.key)
            if event.kind in _MOVES:
                self._fulfil(moves_of(event.key))

    def close(self) -> None:
        """From now on everybody is answered at once with what is known."""
        self.is_closed = True
        self.wake_all()

    def wake_all(self) -> None:
        """Events were missed that some waited for."""
        for key in list(self._waiting):
            self._fulfil(key)
        for expectation in self._behind:
            expectation.fulfil()

    def _new(self) -> Expectation:
        expectation = Expectation()
        if self.is_closed:
            expectation.fulfil()
        return expectation

    def _fulfil(self, key: str) -> None:
        for expectation in self._waiting.pop(key, ()):
            expectation.fulfil()
