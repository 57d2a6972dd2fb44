"""One runner process as the agent sees it: given orders, listened to, watched to its end."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from typing import Any

import structlog
from gpubroker.runtime.journal import START_OVER
from gpubroker.runtime.messages import Report, RunKey
from ray.exceptions import OutOfMemoryError, RayError

from gpubroker_server.adapters.ray.agent.handshake import describe
from gpubroker_server.adapters.ray.agent.retry_until_done import until_done
from gpubroker_server.adapters.ray.processes import ProcessId, Watched
from gpubroker_server.adapters.ray.wire import unpack

log = structlog.get_logger("gpubroker.agent")


class Lane:
    """One runner process and the conversation with it.

    `on_report` hears every report once, in order. `on_end` is called when the process is gone and nothing
    more will be heard of it; again, if it raised.
    """

    def __init__(
        self,
        name: str,
        actor: Any,
        process: ProcessId,
        *,
        shared: bool,
        protocol: int | None,
        on_report: Callable[["Lane", Report], None],
        on_end: Callable[["Lane"], None],
    ) -> None:
        """`protocol`: to speak; None asks for it first. Raises ProcessLookupError if the process is gone."""
        self.name = name
        self.shared = shared
        self.runs: set[RunKey] = set()
        """Runs that have not ended."""
        self.retiring = False
        self.out_of_memory = False
        self.breach = ""
        """Why the process is being ended by us, if it took more than it may have."""
        self.watched = Watched(process, self._note_end)
        self.protocol = protocol
        self._actor = actor
        self._asking: asyncio.Task[int] | None = None
        self._on_report = on_report
        self._on_end = on_end
        self._heard = 0
        self._early: dict[int, Report] = {}
        self._calls = 0
        self._open_calls: set[asyncio.Task[None]] = set()
        self._waiting: list[tuple[Any, ...]] = []

    def hand_over(self, *items: tuple[Any, ...]) -> None:
        """Send orders; those of one turn of the event loop travel together."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._send)
        self._waiting += items

    def listen_again(self, *items: tuple[Any, ...]) -> None:
        """Hear everything that the process still keeps: for an agent that did not make it."""
        self._heard = START_OVER
        self._call(items)

    def _send(self) -> None:
        items, self._waiting = self._waiting, []
        self._call(items)

    def _call(self, items: Sequence[tuple[Any, ...]]) -> None:
        self._calls += 1
        call = asyncio.create_task(self._exchange(self._calls, items))
        self._open_calls.add(call)
        call.add_done_callback(self._open_calls.discard)

    async def _exchange(self, number: int, items: Sequence[tuple[Any, ...]]) -> None:
        try:
            protocol = self.protocol or await self._agreed()
            self._hear(unpack(await self._actor.exchange.remote(protocol, self._heard, items)))
        except OutOfMemoryError:
            self.out_of_memory = True
        except RayError as fault:
            # Usually its process has just ended. One that lives but cannot be talked to is of no use.
            log.info("a runner is lost", runner=self.name, fault=str(fault))
            self.watched.signal(signal.SIGKILL)
        except Exception:
            # Nothing that it says would be heard any more, the ends of its runs included.
            log.exception("a runner cannot be listened to; ending it", runner=self.name)
            self.watched.signal(signal.SIGKILL)
        else:
            if number == self._calls and self.runs:
                self._call([])

    async def _agreed(self) -> int:
        """Whoever made the process may have been of another release. It is asked once, and has all the time:
        it may be at work."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        return await self._asking

    async def _ask(self) -> int:
        told = await describe(self._actor, None)
        self.protocol = int(told["protocol"])
        return self.protocol

    def _hear(self, reply: Sequence[tuple[int, Report]]) -> None:
        """A later call's reply may come first: reports wait for those that were written before them."""
        self._early.update((number, report) for number, report in reply if number > self._heard)
        if self._heard == START_OVER and self._early:
            self._heard = min(self._early) - 1
        while (report := self._early.pop(self._heard + 1, None)) is not None:
            self._heard += 1
            self._on_report(self, report)

    def _note_end(self) -> None:
        end = asyncio.create_task(self._silence())
        self._open_calls.add(end)
        end.add_done_callback(self._open_calls.discard)

    async def _silence(self) -> None:
        """Its last words may still be on their way when the process is gone."""
        calls = self._open_calls - {asyncio.current_task()}
        if calls:
            await asyncio.wait(calls, timeout=5.0)
        await until_done(f"taking note that runner {self.name} has ended", self._tell_end)

    async def _tell_end(self) -> None:
        self._on_end(self)
