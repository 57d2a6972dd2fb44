"""Implements `ports.WorkerCalls` on Ray. Calls go through a driver process, several at once."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from itertools import count
from time import monotonic
from typing import Any

import msgspec

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
NO_ROOM = "too much was on its way to this gateway's Ray driver"


class RayWorkerCalls:
    """Makes calls through a driver that may be lost and replaced."""

    def __init__(self, send: Callable[..., None], room: Callable[[], Awaitable[None]]) -> None:
        """`send` sends a message to the driver, if there is one. `room` returns when the driver has read
        nearly all messages."""
        self._send = send
        self._room = room
        self._sending = asyncio.Lock()
        self._numbers = count()
        self._open: dict[int, asyncio.Future[bytes]] = {}
        self.is_connected = False

    async def call(self, run: WorkerRun, call: WorkerCall, seconds: Seconds) -> CallAnswer:
        until = monotonic() + seconds
        async with self._sending:  # so that an order waits behind one call at most
            await self._room()
        if not self.is_connected:
            return NotBegun(NO_DRIVER)
        if (left := until - monotonic()) <= 0:
            return NotBegun(NO_ROOM, is_late=True)
        number = next(self._numbers)
        answered = self._open[number] = asyncio.get_running_loop().create_future()
        self._send("call", number, run.node, run.task, run.fence, left, pack(call))
        form = call.form
        del call  # this frees the memory of its arguments
        try:
            return answer_of(await answered, form)
        finally:
            self._open.pop(number, None)

    def on_answer(self, number: int, packed: bytes) -> None:
        """Hand the answer to the request that waits for the call, if one still does."""
        answered = self._open.get(number)
        if answered is not None and not answered.done():
            answered.set_result(packed)

    def on_driver_end(self, fault: str) -> None:
        self.is_connected = False
        for number in self._open:
            self.on_answer(number, pack(("lost", fault)))


def answer_of(packed: bytes, form: str) -> CallAnswer:
    """Return the answer of a call as a value. The bytes are checked, because a process with user code may
    have written anything."""
    try:
        answer = unpack(packed)
    except Exception:
        answer = ()
    match answer:
        case ("done", bytes(result), float(seconds)) if 0.0 <= seconds < math.inf and _is_in(form, result):
            return Called(result, seconds)
        case ("failed", str(kind), str(message), str(traceback)):
            return MethodFailed(kind, message, traceback)
        case ("refused" | "late" as outcome, str(reason)):
            return NotBegun(reason, is_late=outcome == "late")
        case ("lost", str(reason)):
            return WorkerLost(reason)
        case _:
            return MethodFailed("malformed_answer", "its process wrote something that is no answer")


def _is_in(form: str, result: bytes) -> bool:
    """Return True if the bytes of a result are of this form. A pickle is not checked, because only the
    caller opens it."""
    if form != "json":
        return True
    try:
        msgspec.json.decode(result, type=msgspec.Raw)
        return result.isascii() or bool(result.decode())
    except ValueError:
        return False


class CallingDriver:
    """The driver process of a gateway that never leads. It only carries calls, and is started by the first
    one."""

    def __init__(self, options: RayOptions) -> None:
        self._keeper = DriverKeeper(options, lambda: (0, 0), self._on_message, self._on_end)
        self._calls = RayWorkerCalls(self._keeper.send, self._keeper.room)

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
