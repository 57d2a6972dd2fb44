"""Has a run carried out by another interpreter: that of the run's environment, in a child process.

The child has a `RunHost` of its own (`child_main`). This process passes on the agent's messages to it, and
its reports to the agent, and ends as the child has ended.
"""

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from gpubroker.runtime.child_messages import Messages
from gpubroker.runtime.journal import Journal
from gpubroker.runtime.messages import Report, RunKey, RunOrder
from gpubroker.runtime.output import Output

if TYPE_CHECKING:
    import asyncio

_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); from gpubroker.runtime.child_main import main; "
    "main(sys.argv[1], int(sys.argv[2]))"
)


class ChildHost:
    """The child process of one run. Its methods may be called from one thread; the child's messages arrive
    in another one."""

    def __init__(
        self, order: RunOrder, journal: Journal, output: Output, on_end: Callable[[RunKey], None]
    ) -> None:
        """`on_end` is called before the end of the run is reported."""
        self._order = order
        self._journal = journal
        self._output = output
        self._on_end = on_end
        self._calls: dict[int, asyncio.Future[Any]] = {}
        """The calls to a worker of a set that the child has not answered."""
        self._numbers = count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_ended = False

    def start(self, host_address: str, task_path: Sequence[str]) -> None:
        """Start the child with the environment, the user and the directory of this process. Raises OSError if
        its interpreter cannot be started."""
        order = self._order
        own, childs = socket.socketpair()
        with childs:
            # Without -P, the child would look for modules in its directory before its own.
            words = (order.interpreter, "-P", "-c", _PROGRAM, order.brought, str(childs.fileno()))
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=(childs.fileno(),))  # noqa: S603  # its purpose
        self._messages = Messages(own)
        self._messages.send("start", order.to_wire(), host_address, tuple(task_path))
        threading.Thread(target=self._listen, name="child", daemon=True).start()

    def pass_on(self, item: Sequence[Any]) -> None:
        """Pass on a message of the agent. One that arrives after the end is dropped."""
        with contextlib.suppress(OSError):
            self._messages.send("item", tuple(item))

    async def call(self, role: str, method: str, form: str, arguments: bytes, seconds: float) -> Any:
        """Call a method of the worker of a set, as `SetWorker.call` does."""
        import asyncio

        self._loop = asyncio.get_running_loop()
        number, answer = next(self._numbers), self._loop.create_future()
        self._calls[number] = answer
        try:
            self._messages.send("call", number, role, method, form, arguments, seconds)
            return await answer
        finally:
            del self._calls[number]

    def _listen(self) -> None:
        for kind, *values in self._messages.received():
            match kind, values:
                case "add", (report, delay_seconds, after_news_of):
                    self._add(report, delay_seconds, after_news_of)
                case "note", (key, report, delay_seconds):
                    self._journal.note(RunKey(*key), report, delay_seconds)
                case "answer", (number, answer) if self._loop is not None:
                    self._loop.call_soon_threadsafe(self._settle, number, answer)
        self._end_as_child()

    def _add(self, report: Report, delay_seconds: float, after_news_of: Any) -> None:
        key = None if after_news_of is None else RunKey(*after_news_of)
        if report[0] == "ended":
            self._has_ended = True
            report = (*report[:9], self._output.tail())  # the child cannot read what it printed
            self._journal.add(report, delay_seconds, after_news_of=key)
            self._on_end(self._order.key)
        else:
            self._journal.add(report, delay_seconds, after_news_of=key)

    def _settle(self, number: int, answer: Any) -> None:
        future = self._calls.get(number)
        if future is not None and not future.done():
            future.set_result(answer)

    def _end_as_child(self) -> None:
        """End this process as the child has ended, unless the end of the run was reported: the agent then
        reports the loss as that of any run whose process has ended."""
        code = self._process.wait()
        if self._has_ended:
            return
        if code < 0:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(max(code, 0))
