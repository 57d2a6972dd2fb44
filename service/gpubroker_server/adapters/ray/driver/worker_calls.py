"""Implements `ports.WorkerCalls` on Ray: calls go through a driver process, several at once."""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

from gpubroker_server.adapters.ray.driver.link import DriverKeeper
from gpubroker_server.adapters.ray.options import RayOptions
from gpubroker_server.adapters.ray.wire import pack, unpack
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.ports.worker_calls import (
    CallAnswer,
    Called,
    MethodFailed,
    NotBegun,
    WorkerCall,
    WorkerLost,
    WorkerRun,
)

NO_DRIVER = "this gateway's Ray driver is not connected"


class RayWorkerCalls:
    """The service's side of calls, over a driver that may be lost and replaced."""

    def __init__(self, send: Callable[..., None]) -> None:
        """`send`: to the driver, once there is one."""
        self._send = send
        self._numbers = count()
        self._open: dict[int, asyncio.Future[CallAnswer]] = {}
        self.is_connected = False

    async def call(self, run: WorkerRun, call: WorkerCall, seconds: Seconds) -> CallAnswer:
        if not self.is_connected:
            return NotBegun(NO_DRIVER)
        number = next(self._numbers)
        answered = self._open[number] = asyncio.get_running_loop().create_future()
        self._send("call", number, run.node, run.task, run.fence, seconds, pack(call))
        try:
            async with asyncio.timeout(seconds):
                answer: CallAnswer = await answered
                return answer
        finally:
            self._open.pop(number, None)

    def on_answer(self, number: int, packed: bytes) -> None:
        """Nothing happens if no request waits for it any more."""
        answered = self._open.get(number)
        if answered is not None and not answered.done():
            answered.set_result(answer_of(unpack(packed)))

    def on_driver_end(self, fault: str) -> None:
        self.is_connected = False
        for answered in self._open.values():
            if not answered.done():
                answered.set_result(WorkerLost(fault))


def answer_of(answer: tuple[Any, ...]) -> CallAnswer:
    """A process with user code may have written anything."""
    match answer:
        case ("done", bytes(result), float(seconds)):
            return Called(result, seconds)
        case ("failed", str(kind), str(message), str(traceback)):
            return MethodFailed(kind, message, traceback)
        case ("refused" | "late" as what, str(why)):
            return NotBegun(why, is_late=what == "late")
        case ("lost", str(why)):
            return WorkerLost(why)
        case _:
            return MethodFailed("malformed_answer", "its process wrote something that is no answer")


class CallingDriver:
    """A driver process of a gateway that leads nothing: it only carries calls. Started by the first one."""

    def __init__(self, options: RayOptions) -> None:
        self._keeper = DriverKeeper(options, lambda: (0, 0), self._on_message, self._on_end)
        self._calls = RayWorkerCalls(self._keeper.send)

    async def call(self, run: WorkerRun, call: WorkerCall, seconds: Seconds) -> CallAnswer:
        self._keeper.begin()
        return await self._calls.call(run, call, seconds)

    async def close(self) -> None:
        await self._keeper.close()

    def _on_message(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("answer", number, packed):
                self._calls.on_answer(number, packed)
            case ("connected",):
                self._calls.is_connected = True

    def _on_end(self, fault: str, _head_ended: bool) -> bool:
        was_connected = self._calls.is_connected
        self._calls.on_driver_end(fault)
        return was_connected
