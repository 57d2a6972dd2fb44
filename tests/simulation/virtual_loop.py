"""An event loop for each process, all on one timeline: they stop, sleep and die at any step of theirs."""

import asyncio
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from random import Random
from typing import Any

from gpubroker_server.core.domain.units import MonotonicSeconds

from tests.simulation.timeline import Timeline

LONGEST_STEP_SECONDS = 0.001
"""From one round of what is ready to the next: in between, something else may happen."""


class Host:
    """A machine with a clock of its own, which runs a little too fast or too slow, and may sleep."""

    def __init__(self, timeline: Timeline, rate: float = 1.0) -> None:
        self._timeline = timeline
        self._since = timeline.now()
        self._rate = rate
        self._slept = 0.0
        self._asleep_since: float | None = None
        self._wakers: list[Callable[[], None]] = []

    @property
    def is_asleep(self) -> bool:
        return self._asleep_since is not None

    def ticks(self) -> MonotonicSeconds:
        """CLOCK_BOOTTIME: its sleep included."""
        return MonotonicSeconds((self._timeline.now() - self._since) * self._rate)

    def monotonic(self) -> float:
        """CLOCK_MONOTONIC: without its sleep."""
        until = self.ticks() if self._asleep_since is None else self._asleep_since
        return until - self._slept

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """In so many seconds of its own, its sleep not counted."""
        self._timeline.after(max(0.0, seconds) / self._rate, act)

    def sleep(self, seconds: float) -> None:
        if not self.is_asleep:
            self._asleep_since = self.ticks()
            self._timeline.after(seconds, self._wake)

    def once_awake(self, act: Callable[[], None]) -> None:
        """At once, or when it wakes up."""
        if self.is_asleep:
            self._wakers.append(act)
        else:
            act()

    def _wake(self) -> None:
        assert self._asleep_since is not None
        self._slept += self.ticks() - self._asleep_since
        self._asleep_since = None
        wakers, self._wakers = self._wakers, []
        for act in wakers:
            act()


class NumberedTask(asyncio.Task[Any]):
    """Sets of tasks are in the order in which the tasks were made, whatever their addresses are."""

    def __init__(self, number: int, coro: Coroutine[Any, Any, Any], **given: Any) -> None:
        self._number = number
        super().__init__(coro, **given)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.AbstractEventLoop):
    """What one process has ready runs a moment later, unless it is stopped; nothing takes any time."""

    def __init__(self, timeline: Timeline, host: Host, chance: Random) -> None:
        self._timeline = timeline
        self._host = host
        self._chance = chance
        self._ready: deque[asyncio.Handle] = deque()
        self._is_due = False
        self._stops = 0
        self._is_dead = False
        self._tasks: list[NumberedTask] = []
        self.faults: list[BaseException] = []
        """Not retrieved yet."""

    def time(self) -> float:
        return self._host.monotonic()

    def get_debug(self) -> bool:
        return False

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]  # as little of it as is needed
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task = NumberedTask(len(self._tasks), coro, loop=self, name=name, context=context)
        self._tasks.append(task)
        return task

    def call_soon(  # type: ignore[override]  # any callback
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        self._plan()
        return handle

    def call_later(  # type: ignore[override]  # any callback
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]  # any callback
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._host.after(when - self.time(), lambda: self._fire(timer))
        return timer

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.faults.append(context.get("exception") or RuntimeError(context["message"]))

    def stop_for(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later; what comes in meanwhile waits."""
        self._stops += 1
        self._timeline.after(seconds, self._continue)

    def die(self) -> None:
        """Nothing of it runs any more, not even what cleans up."""
        self._is_dead = True
        self._ready.clear()

    def bury(self) -> None:
        """Let go of what the dead have left, in silence."""
        for task in reversed(self._tasks):
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                with suppress(BaseException):
                    task.get_coro().close()
        self._tasks.clear()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It stays on the timeline, and does nothing there."""

    def _continue(self) -> None:
        self._stops -= 1
        self._plan()

    @property
    def _is_held(self) -> bool:
        return self._is_dead or self._stops > 0 or self._host.is_asleep

    def _fire(self, timer: asyncio.TimerHandle) -> None:
        if timer.cancelled() or self._is_dead:
            return
        if self._host.is_asleep:
            self._host.once_awake(lambda: self._fire(timer))
        elif (early := timer.when() - self.time()) > 1e-6:
            self._host.after(early, lambda: self._fire(timer))
        else:
            self._ready.append(timer)
            self._plan()

    def _plan(self) -> None:
        if not self._is_due and self._ready and not self._is_dead:
            self._is_due = True
            self._timeline.after(self._chance.random() * LONGEST_STEP_SECONDS, self._run)

    def _run(self) -> None:
        self._is_due = False
        if self._host.is_asleep:
            self._host.once_awake(self._plan)
            return
        for _ in range(len(self._ready)):
            if self._is_held:
                return
            handle = self._ready.popleft()
            if not handle.cancelled():
                events._set_running_loop(self)
                try:
                    handle._run()
                finally:
                    events._set_running_loop(None)
        if not self._is_held:
            self._plan()
