"""Count the calls of Python and C functions by the process of the service that would make them.

The parts of all processes run in one process here. Which of them makes a call is a context variable, which
tasks and callbacks of asyncio inherit from what made them; a thread inherits it from the thread that started
it.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

SERVICE, DRIVER, AGENT, RUNNER = "service", "driver", "agent", "runner"
PROCESSES = (SERVICE, DRIVER, AGENT, RUNNER)
CLIENT = "client"
"""The process name of everything that is no process of the service. Its calls are not reported."""

current_process: ContextVar[str] = ContextVar("current_process", default=CLIENT)

_LIBRARY = Path(threading.__file__).parent
_LEFT_OUT = tuple(
    str(_LIBRARY / name)
    for name in (
        "asyncio",
        "concurrent/futures",
        "threading.py",
        "selectors.py",
        "queue.py",
        "contextvars.py",
    )
)
"""Calls of these files do not count: the service runs on uvloop, whose event loop makes none of them, and how
often threads wait for one another depends on the machine."""

_HERE = str(Path(__file__).parent)

_PER_PROCESS = ("adapters/ray/processes.py", "psutil/__init__.py", "psutil/_pslinux.py", "psutil/_common.py")
"""Calls of these files do not count either: they read /proc, so their number grows with the processes of the
machine."""

_GENERATED = "<string>"
"""The file name of code that makes a named tuple. Its calls count as calls of its caller."""

Place = tuple[int, str, CodeType, bool]
"""(thread, process, code, whether a C function was called by this code rather than this code itself)"""


class CallCounter:
    """Counts calls from `begin` to `end`, in the thread that calls `install` and in all threads that are
    started later."""

    def __init__(self) -> None:
        self._is_counting = False
        self._counts: dict[Place, int] = {}
        self._counted: dict[CodeType, bool] = {}

    def install(self) -> None:
        _let_threads_inherit_the_process()
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def begin(self) -> None:
        self._counts = {}
        self._is_counting = True

    def end(self) -> "CallCounts":
        self._is_counting = False
        found: dict[str, Counter[str]] = {}
        for (_, process, code, is_c), count in self._counts.items():
            found.setdefault(process, Counter())[_name_of(code, is_c=is_c)] += count
        return CallCounts(found)

    def _on_event(self, frame: FrameType, event: str, _about: Any) -> None:
        if not self._is_counting or (event != "call" and event != "c_call"):
            return
        code, caller = frame.f_code, frame.f_back
        if self._counts_in(code) and not (
            code.co_filename == _GENERATED and caller is not None and not self._counts_in(caller.f_code)
        ):
            # Each thread counts for itself, so that no count is lost to another thread at the same moment.
            place = threading.get_ident(), current_process.get(), code, event == "c_call"
            self._counts[place] = self._counts.get(place, 0) + 1

    def _counts_in(self, code: CodeType) -> bool:
        counts = self._counted.get(code)
        if counts is None:
            file = code.co_filename
            is_left_out = file.startswith((_HERE, *_LEFT_OUT)) or file.endswith(_PER_PROCESS)
            counts = self._counted[code] = not is_left_out
        return counts


class CallCounts:
    def __init__(self, by_process: Mapping[str, Counter[str]]) -> None:
        self._by_process = by_process

    def total(self, process: str) -> int:
        return sum(self._by_process.get(process, {}).values())

    def by_process(self) -> dict[str, int]:
        return {process: self.total(process) for process in PROCESSES if self.total(process)}

    def most_called(self, process: str, most: int) -> list[tuple[str, int]]:
        return self._by_process.get(process, Counter()).most_common(most)


def _name_of(code: CodeType, *, is_c: bool) -> str:
    """Return a name such as `admission/admit.py:admit`, or `admission/admit.py:admit (C)` for the C functions
    that this code calls."""
    path = "/".join(Path(code.co_filename).parts[-2:])
    return f"{path}:{code.co_qualname}" + (" (C)" if is_c else "")


def _let_threads_inherit_the_process() -> None:
    """Let each new thread inherit the process name of the thread that starts it, since a thread begins with
    an empty context."""
    start: Callable[[threading.Thread], None] = threading.Thread.start

    def start_in_the_process_of_its_creator(thread: threading.Thread) -> None:
        process, run = current_process.get(), thread.run

        def run_in_process() -> None:
            current_process.set(process)
            run()

        thread.run = run_in_process  # type: ignore[method-assign]
        start(thread)

    threading.Thread.start = start_in_the_process_of_its_creator  # type: ignore[assignment,method-assign]
