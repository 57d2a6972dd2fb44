"""The process in which the interpreter of an environment carries out one run. It is started by `ChildHost`,
with the environment, the user and the directory of the run."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from gpubroker.runtime.child_messages import Messages
from gpubroker.runtime.host import RunHost
from gpubroker.runtime.journal import AT_ONCE, LAZILY, Journal
from gpubroker.runtime.messages import Report, RunKey, RunOrder
from gpubroker.runtime.process import adopt_orphans, look_for_modules_in


class SentJournal(Journal):
    """Sends each report to the process that started this one, which keeps it until it is acknowledged."""

    def __init__(self, messages: Messages) -> None:
        super().__init__(lambda _delay_seconds: None)
        self._messages = messages

    def add(self, report: Report, delay_seconds: float = AT_ONCE, *, after_news_of: Hashable = None) -> None:
        self._messages.send("add", _plain(report), delay_seconds, _plain(after_news_of))

    def note(self, key: Hashable, report: Report, delay_seconds: float = LAZILY) -> None:
        self._messages.send("note", _plain(key), _plain(report), delay_seconds)

    def note_to_make(
        self, key: Hashable, _kind: str, report: Report | Callable[[], Report], delay_seconds: float = LAZILY
    ) -> None:
        self.note(key, report() if callable(report) else report, delay_seconds)


class _NoOutput:
    def tail(self) -> bytes:
        """Return nothing: the process that started this one reads the files of its output."""
        return b""


def main(brought: str, descriptor: int) -> None:
    """Carry out the run that arrives at this socket, until the other end is gone. `brought` is the directory
    from which this module was imported."""
    # The environment's own packages come first from now on; what is already imported stays.
    sys.path.remove(brought)
    sys.path.append(brought)
    os.set_inheritable(descriptor, False)
    # Threads of the process that started this one may have signals blocked, and a child inherits that.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    messages = Messages(socket.socket(fileno=descriptor))
    received = messages.received()
    _, fields, host_address, task_path = next(received)
    order = RunOrder.from_wire(fields)
    look_for_modules_in(task_path)
    if order.upload:
        sys.path.insert(0, order.working_directory)
    adopt_orphans()
    host = RunHost(SentJournal(messages))
    host.begin_alone(order, host_address, _NoOutput())
    answer: Callable[[int, Sequence[Any]], None] | None = None
    for kind, *values in received:
        match kind, values:
            case "item", (item,):
                host.take(item)
            case "call", (number, *call):
                answer = answer or _answering(host, messages, order.key)
                answer(number, call)
    os._exit(0)  # the process of the run is gone


def _answering(host: RunHost, messages: Messages, key: RunKey) -> Callable[[int, Sequence[Any]], None]:
    """Return a function that has a call answered on an event loop in another thread."""
    import asyncio  # half of the time of all imports here, and only worker sets need it

    async def answer(number: int, call: Sequence[Any]) -> None:
        messages.send("answer", number, await host.call(key, *call))

    def begin(number: int, call: Sequence[Any]) -> None:
        asyncio.run_coroutine_threadsafe(answer(number, call), loop)

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="calls", daemon=True).start()
    return begin


def _plain(value: Any) -> Any:
    """Return the value with plain tuples in place of named ones, which need their class to be unpickled."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return list(map(_plain, value)) if isinstance(value, list) else value
