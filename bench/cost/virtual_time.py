"""An event loop whose clock stands still while anything is running, and jumps to the next timer when nothing
is.

The counts then do not depend on the speed of the machine: a job that runs every quarter of a second runs as
often per task everywhere. Install the clock before importing any module that keeps a function of `time`.
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
"""The time in seconds since 1970 at which the clocks start. All texts of later times have the same length."""

PATIENCE_SECONDS = 60.0
"""The seconds of real time after which a loop that waits for a thread gives up."""

READ_BYTES = 4096
"""The bytes that a read allocates. Asyncio allocates as much for each read; uvloop, on which the service
runs, allocates only what has arrived."""

_real_monotonic = time.monotonic


class VirtualClock:
    """The clocks of this process. Only `advance` moves them."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        """The seconds since BOOTED_AT. The number stays small because the loop compares its times to the
        nanosecond."""

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
    """Tracks the work that other threads have been given and have not finished. The clock stands still
    meanwhile.

    The event loop waits at once for what it gives to an executor, so the order of the two is never chance. It
    waits for the writer of the database when it has nothing else to do, because the writer answers on the
    loop.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        """The number of threads that work for an executor."""
        self._awaited = 0
        """The number of answers of the writer that have not arrived."""
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
        """Wait until no thread works for an executor."""
        if threading.get_ident() == self._loop_thread:
            with self._changed:
                if not self._changed.wait_for(lambda: self._running == 0, PATIENCE_SECONDS):
                    raise RuntimeError(
                        f"a thread was at work for {PATIENCE_SECONDS:g} s; the counted path hangs"
                    )

    def watch_executors(self) -> None:
        """Count work that is submitted to executors until its callbacks have been called, since one of them
        tells the event loop that the work has ended. `concurrent.futures` has no public hook for that
        moment."""
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
    """An event for which a thread of an executor waits. A waiting thread does not count as working."""

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
        """Wait without a timeout, since a thread knows no virtual time."""
        with self._turn:
            if self.is_set():
                return True
            self._waiting += 1
            self._work.end()
        return super().wait()


class VirtualTimer:
    """Takes the place of `threading.Timer`: the event loop calls the function when its virtual time has
    passed."""

    daemon = True

    def __init__(self, loop: "VirtualLoop", seconds: float, function: Callable[[], None]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._function = function

    def start(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.call_later, self._seconds, self._function)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time. Its connections are Unix sockets because these deliver at once; TCP
    delivers when the kernel has time for it, and the clock could not wait for that."""

    def __init__(self, clock: VirtualClock, work: WorkOfThreads) -> None:
        selector: selectors.BaseSelector = _JumpingSelector(clock, work)
        super().__init__(selector)
        transports: Any = asyncio.selector_events
        transports._SelectorTransport.max_size = READ_BYTES
        self._sockets: dict[int, Path] = {}

    def serve_port_at(self, port: int, path: Path) -> None:
        """Connect to this Unix socket whenever a connection to the port is requested."""
        self._sockets[port] = path

    async def create_connection(  # type: ignore[override]  # its overloads tell apart what is passed on here
        self, factory: Any, _host: Any = None, port: Any = None, **_options: Any
    ) -> Any:
        return await self.create_unix_connection(factory, str(self._sockets[port]))


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that moves the clock to the time until which the loop would wait."""

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
        if found := super().select(0):  # messages from a thread before its work ended
            return found
        if timeout is None:
            raise RuntimeError("nothing is at work and nothing is due; the counted path hangs")
        self._clock.advance(timeout)
        return []
