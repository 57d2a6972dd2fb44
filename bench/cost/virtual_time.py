"""An event loop whose clock stands still while anything is at work, and jumps to the next timer when nothing
is.

What is counted then does not depend on the speed of the machine: a job that runs every quarter of a second
runs as often per task everywhere. Install the clock before anything that keeps a function of `time` is
imported.
"""

import asyncio
import asyncio.selector_events
import selectors
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.thread import _WorkItem
from pathlib import Path
from typing import Any

BOOTED_AT = 1_750_000_000.0
"""Seconds since 1970 of the clocks' zero. All texts of times have the same length from then on."""

PATIENCE_SECONDS = 60.0
"""Real time after which a loop that waits for a thread gives up."""

READ_BYTES = 4096
"""Asyncio allocates as much for each read; uvloop, on which the service runs, allocates what has come."""

_real_monotonic = time.monotonic


class VirtualClock:
    """The clocks of this process. Only `advance` moves them."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        """Since BOOTED_AT. A small number: the loop compares its times to the nanosecond."""

    def advance(self, seconds: float) -> None:
        self.seconds += seconds

    def install(self) -> None:
        """Replace the clocks of the module `time`."""
        for name in ("monotonic", "perf_counter"):
            vars(time)[name] = lambda: self.seconds
        vars(time)["clock_gettime"] = lambda _clock: self.seconds
        vars(time)["time"] = lambda: BOOTED_AT + self.seconds
        vars(time)["time_ns"] = lambda: int((BOOTED_AT + self.seconds) * 1e9)


class WorkOfThreads:
    """Knows what other threads have been given and have not finished. The clock stands still meanwhile.

    The event loop waits at once for what it gives to an executor, so that which of the two comes first is no
    matter of chance. The writer of the database is waited for when the loop has nothing else to do: it
    answers on the loop.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        """Threads at work for an executor."""
        self._awaited = 0
        """Answers of the writer that have not come."""
        self._loop_thread = threading.get_ident()

    @property
    def is_open(self) -> bool:
        return self._running + self._awaited > 0

    def await_answer(self, answer: "asyncio.Future[Any]") -> None:
        self._awaited += 1
        answer.add_done_callback(self._on_answer)

    def _on_answer(self, _answer: "asyncio.Future[Any]") -> None:
        self._awaited -= 1

    def begin(self, threads: int = 1) -> None:
        with self._changed:
            self._running += threads

    def end(self) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until no thread is at work for an executor. Nothing happens in such a thread itself."""
        if threading.get_ident() == self._loop_thread:
            with self._changed:
                if not self._changed.wait_for(lambda: self._running == 0, PATIENCE_SECONDS):
                    raise RuntimeError(
                        f"a thread was at work for {PATIENCE_SECONDS:g} s; the counted path hangs"
                    )

    def watch_executors(self) -> None:
        """Count what is submitted to executors until its callbacks have been called too, since one of them
        tells the event loop of its end. `concurrent.futures` has no public hook for that moment."""
        submit, run = ThreadPoolExecutor.submit, _WorkItem.run

        def counted_submit(*arguments: Any, **named: Any) -> Any:
            self.begin()
            future = submit(*arguments, **named)
            self.wait()
            return future

        def counted_run(item: Any) -> None:
            try:
                run(item)
            finally:
                self.end()

        ThreadPoolExecutor.submit = counted_submit  # type: ignore[method-assign]
        _WorkItem.run = counted_run  # type: ignore[assignment,method-assign]


class CountedEvent(threading.Event):
    """An event for which a thread of an executor waits. The thread is not at work while it waits."""

    def __init__(self, work: WorkOfThreads) -> None:
        super().__init__()
        self._work = work
        self._turn = threading.Lock()
        self._waiting = 0

    def set(self) -> None:
        with self._turn:
            self._work.begin(self._waiting)
            self._waiting = 0
            super().set()
        self._work.wait()

    def wait(self, _timeout: float | None = None) -> bool:
        """Wait without a timeout: a thread knows no virtual time."""
        with self._turn:
            if self.is_set():
                return True
            self._waiting += 1
            self._work.end()
        return super().wait()


class VirtualTimer:
    """Takes the place of `threading.Timer`: the event loop calls the function when the virtual time is
    over."""

    daemon = True

    def __init__(self, loop: "VirtualLoop", seconds: float, function: Callable[[], None]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._function = function

    def start(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.call_later, self._seconds, self._function)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time. Its connections are made of Unix sockets, since those deliver at once:
    TCP delivers when the kernel has time for it, and the clock could not wait for that."""

    def __init__(self, clock: VirtualClock, work: WorkOfThreads) -> None:
        selector: selectors.BaseSelector = _JumpingSelector(clock, work)
        super().__init__(selector)
        transports: Any = asyncio.selector_events
        transports._SelectorTransport.max_size = READ_BYTES
        self._sockets: dict[int, Path] = {}

    def serve_port_at(self, port: int, path: Path) -> None:
        """Connect to this Unix socket where a connection to the port is asked for."""
        self._sockets[port] = path

    async def create_connection(  # type: ignore[override]  # its overloads tell apart what is passed on here
        self, factory: Any, _host: Any = None, port: Any = None, **_options: Any
    ) -> Any:
        return await self.create_unix_connection(factory, str(self._sockets[port]))


class _JumpingSelector(selectors.DefaultSelector):
    """Moves the clock to the time for which the loop would wait."""

    def __init__(self, clock: VirtualClock, work: WorkOfThreads) -> None:
        super().__init__()
        self._clock = clock
        self._work = work

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if found or timeout == 0:
            return found
        gives_up_at = _real_monotonic() + PATIENCE_SECONDS
        while self._work.is_open:
            if found := super().select(0.001):
                return found
            if _real_monotonic() > gives_up_at:
                raise RuntimeError(
                    f"a thread has been at work for {PATIENCE_SECONDS:g} s; the counted path hangs"
                )
        if found := super().select(0):  # what a thread told the loop before its work ended
            return found
        if timeout is None:
            raise RuntimeError("nothing is at work and nothing is due; the counted path hangs")
        self._clock.advance(timeout)
        return []
