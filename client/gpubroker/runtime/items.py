"""The process of a worker of an array, which calls one function or command for each item that it gets."""

import ctypes
import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import cloudpickle

from gpubroker.runtime.command import Command, CommandTimeout
from gpubroker.runtime.invoke import (
    CannotOpen,
    Invocation,
    called,
    opened,
    with_object,
    with_objects,
)
from gpubroker.runtime.journal import AT_ONCE, Journal
from gpubroker.runtime.messages import (
    MESSAGE_CHARS,
    ItemResult,
    RunOrder,
    RunOutcome,
    ended,
    failed,
    items,
    plain_text,
)
from gpubroker.runtime.objects import ObjectRef
from gpubroker.runtime.outcome import describe
from gpubroker.runtime.output import Output
from gpubroker.runtime.run_objects import RunObjects
from gpubroker.runtime.task import RunningTask, Stopped

ARRAY_VARIABLE = "GPUBROKER_ARRAY"
"""The variable that marks workers of arrays: JSON with the limits of an item, and whether the items are
pickled."""

REPORT_SECONDS = 0.5
"""The time between two reports of results, also while an item runs. When no items are left in this process,
results are reported at once."""
LOW_SECONDS = 0.1
"""Results are also reported at once when the items left in this process take less than this time, which is
enough for the answer with further items to arrive."""
AHEAD_SECONDS = 1.0
"""The seconds of work to keep in this process, so that it never waits for the answer to a report."""
AGAIN_SECONDS = 2.0
"""The time after which a report without an answer is repeated, because it may have been lost."""
MOST_UNANSWERED_BYTES = 16 * 2**20
"""The next item waits while more bytes of results than this are not acknowledged."""
TRACEBACK_CHARS = 4096
STUCK_SECONDS = 2.0
"""The time after an item's time limit at which its process is ended, because the item is not in Python code
and cannot be interrupted."""
PLACEHOLDER = "{}"
"""The part of a command's words that an item replaces; without it, the item becomes the last word."""
IMPORT_FAILED = "array_import_failed"
"""The kind of a failure to import, with which a worker fails however often it is tried."""
FAILURE, TIMEOUT = "failure", "timeout"
"""The causes that may use a retry of an item. The second is also the kind of the failure of an item that
reached its time limit."""
_LENGTH_BYTES = 8


class ItemTimeout(BaseException):
    """The exception that is raised in the function whose item takes too long."""


class _Stuck(Exception):
    """The run was reported as ended because its item could not be interrupted."""


def is_array(order: RunOrder) -> bool:
    return ARRAY_VARIABLE in order.env


def parted(packed: bytes) -> tuple[bytes, bytes]:
    """Return the two parts of a worker's arguments: those of the function, and all items as a JSON list or a
    pickled list."""
    begin = _LENGTH_BYTES + int.from_bytes(packed[:_LENGTH_BYTES], "big")
    return packed[_LENGTH_BYTES:begin], packed[begin:]


class ItemWorker:
    """Works through the items that the worker holds, in a thread of its own; other threads call `take` and
    `wake`."""

    def __init__(
        self,
        order: RunOrder,
        journal: Journal,
        task: RunningTask,
        output: Output,
        objects: RunObjects,
    ) -> None:
        self._objects = objects
        limits = json.loads(order.env[ARRAY_VARIABLE])
        self._retries: int = limits["item_retries"]
        self._retry_on: Sequence[str] = limits.get("retry_on", (FAILURE, TIMEOUT))
        self._timeout_seconds: float | None = limits["item_timeout_seconds"]
        self._pickled: bool = limits["pickled"]
        arguments, self._packed_items = parted(order.arguments)
        self._order = RunOrder(**{**order.to_wire(), "arguments": arguments})
        self._journal = journal
        self._task = task
        self._output = output
        self._lock = threading.RLock()
        self._news = threading.Event()
        self._todo: deque[int] = deque()
        self._current: int | None = None
        self._tries = 0
        self._results: deque[tuple[int, ItemResult]] = deque()
        """The results without an answer, each with the number of the first report that contained it."""
        self._unanswered_bytes = 0
        self._number = 0
        """The number of the last report."""
        self._answered = 0
        self._is_over = False
        self._seconds = self._done = 0.0
        self._reported_at = 0.0
        self._timer: threading.Timer | None = None
        self._command: Command | None = None
        """The command of the current item."""
        self._watch: _Watch | None = None
        """Watches the time of a function. A command needs no watch: it is waited for with a timeout."""

    def take(self, number: int, held: Iterable[Sequence[int]], *, is_over: bool) -> None:
        """Take the answer to a report."""
        with self._lock:
            if number <= self._answered:
                return
            self._answered = number
            while self._results and self._results[0][0] <= number:
                _, result = self._results.popleft()
                self._unanswered_bytes -= _size_bytes(result)
            finished = {result[0] for _, result in self._results}
            own_numbers = (n for first, end in held for n in range(first, end))
            self._todo = deque(n for n in own_numbers if n not in finished and n != self._current)
            self._is_over = is_over and number == self._number
        self._news.set()

    def work(self) -> RunOutcome:
        """Work until no item is left for this worker, or the worker has to stop."""
        self._task.call_on_stop(self._on_stop)
        try:
            values, call = self._opened()
            if call is not None and self._timeout_seconds is not None:
                self._watch = _Watch(self._timeout_seconds, self._give_up)
            self._report()
            while not self._task.should_stop and not self._is_over:
                number = self._next()
                if number is None:
                    self._wait()
                elif (result := self._result_of(number, values, call)) is not None:
                    self._keep(result)
        except CannotOpen as refusal:
            fault = refusal.outcome.fault
            return failed(IMPORT_FAILED, str(refusal), fault.traceback if fault else "")
        except _Stuck:
            return failed("item_timeout", "an item did not end when its time was over")
        if self._is_over:
            return RunOutcome("succeeded", result=b"null")
        self._current = None
        self._todo.clear()
        self._report(leaving=True)
        return RunOutcome("stopped")

    def _opened(self) -> tuple[Sequence[Any], Invocation | None]:
        call = None
        if self._order.kind != "command":
            call = with_objects(opened(self._order), self._objects.fetch)
        try:
            packed = self._packed_items
            # Unpickling runs code of the submitter, which is allowed only for a function.
            is_pickled = self._pickled and self._order.kind == "function"
            values = cloudpickle.loads(packed) if is_pickled else json.loads(packed)
            return list(values), call
        except BaseException as fault:
            raise CannotOpen(
                failed("import_failed", f"the items cannot be opened: {describe(fault)}")
            ) from None

    def _next(self) -> int | None:
        with self._lock:
            if not self._todo or self._unanswered_bytes > MOST_UNANSWERED_BYTES:
                return None
            self._current = self._todo.popleft()
            return self._current

    def _wait(self) -> None:
        if self._has_unreported:
            self._report()
        if not self._news.wait(AGAIN_SECONDS):
            self._report()
        self._news.clear()

    @property
    def _has_unreported(self) -> bool:
        with self._lock:
            return bool(self._results) and self._results[-1][0] > self._number

    def _keep(self, result: ItemResult) -> None:
        with self._lock:
            self._current = None
            self._results.append((self._number + 1, result))
            self._unanswered_bytes += _size_bytes(result)
            self._seconds += result[1]
            self._done += 1
        left_seconds = self._reported_at + REPORT_SECONDS - time.monotonic()
        if left_seconds <= 0 or self._runs_low:
            self._report()
        elif self._timer is None:
            self._timer = threading.Timer(left_seconds, self._report_late)
            self._timer.daemon = True
            self._timer.start()

    def _report_late(self) -> None:
        self._timer = None
        if self._has_unreported:
            self._report()

    @property
    def _runs_low(self) -> bool:
        """True right after the item with which the remaining work gets below LOW_SECONDS, so only once for
        each answer."""
        todo = len(self._todo)
        return todo > 0 and todo * self._each_seconds <= LOW_SECONDS < (todo + 1) * self._each_seconds

    @property
    def _each_seconds(self) -> float:
        """The mean time of an item, in seconds."""
        return self._seconds / self._done if self._done else AHEAD_SECONDS

    def _report(self, *, leaving: bool = False) -> None:
        """Report all results without an answer, in place of the previous report."""
        with self._lock:
            self._number += 1
            self._reported_at = time.monotonic()
            wanted = 0 if leaving else min(2**20, max(1, int(AHEAD_SECONDS / max(self._each_seconds, 1e-6))))
            self._seconds, self._done = self._seconds / 2, self._done / 2  # recent items count most
            held = [*([] if self._current is None else [self._current]), *self._todo]
            results = [result for _, result in self._results]
            report = items(self._order.key, self._number, results, list(_ranges(sorted(held))), wanted)
            self._journal.note(self._order.key, report, AT_ONCE)

    def _result_of(self, number: int, values: Sequence[Any], call: Invocation | None) -> ItemResult | None:
        """Return the result of an item; None if a stop notice interrupted the item."""
        began, self._tries = time.perf_counter(), 0
        while True:
            self._tries += 1
            if number >= len(values):
                outcome = failed("exception", f"there is no item {number}; there are {len(values)}")
            elif call is None:
                outcome = self._run_command(values[number])
            else:
                outcome = self._call_with_object(number, call, values[number])
            if outcome.ending == "succeeded" or not self._may_try_again(outcome) or self._task.should_stop:
                break
        if outcome.ending != "succeeded" and self._task.should_stop:
            return None
        return _item_result(number, time.perf_counter() - began, self._tries, outcome)

    def _may_try_again(self, outcome: RunOutcome) -> bool:
        is_late = outcome.fault is not None and outcome.fault.kind == TIMEOUT
        return (TIMEOUT if is_late else FAILURE) in self._retry_on and self._tries <= self._retries

    def _call_with_object(self, number: int, call: Invocation, value: Any) -> RunOutcome:
        try:
            return self._call(number, call, with_object(value, self._objects.fetch))
        except CannotOpen as refusal:
            return refusal.outcome
        except Stopped:
            return RunOutcome("stopped")

    def _call(self, number: int, call: Invocation, value: Any) -> RunOutcome:
        invocation = Invocation(call.function, (value, *call.args), call.kwargs)
        if self._watch is None:
            return self._called(invocation)
        try:
            self._watch.begin(number)
            outcome = self._called(invocation)
            is_over = self._watch.end()
        except ItemTimeout:
            is_over, outcome = self._watch.end() or True, self._timed_out()
        return self._timed_out() if is_over else outcome

    def _called(self, invocation: Invocation) -> RunOutcome:
        outcome = called(invocation, self._order, self._objects.store, self._task)
        if outcome.result_format != "object" or self._order.result_format != "cloudpickle":
            return outcome
        named = ObjectRef(json.loads(outcome.result or b"")["object"])
        return replace(outcome, result=cloudpickle.dumps(named))  # in the format of this array's results

    def _timed_out(self) -> RunOutcome:
        return failed(TIMEOUT, f"the item took longer than {self._timeout_seconds:g} s")

    def _give_up(self, number: int) -> None:
        """End the run because the thread of the item cannot be interrupted. Another worker may try the item
        again."""
        with self._lock:
            seconds = (self._timeout_seconds or 0.0) + STUCK_SECONDS
            result = _item_result(number, seconds, self._tries, self._timed_out())
            self._results.append((self._number + 1, result))
            self._current = None
            self._todo.clear()
        self._report(leaving=True)
        outcome = failed("item_timeout", f"item {number} did not end {STUCK_SECONDS:g} s after its limit")
        self._journal.add(ended(self._order.key, outcome, self._output.tail()), after_news_of=self._order.key)

    def _run_command(self, value: Any) -> RunOutcome:
        word = value if isinstance(value, str) else json.dumps(value)
        command = list(self._order.command)
        words = [part.replace(PLACEHOLDER, word) for part in command]
        if not any(PLACEHOLDER in part for part in command):
            words.append(word)
        running = self._command = Command([*self._order.container, *words], self._order.key, self._task)
        try:
            return running.run(self._timeout_seconds)
        except CommandTimeout:
            return self._timed_out()

    def _on_stop(self) -> None:
        self._news.set()
        if self._command is not None:
            self._command.stop()


class _Watch:
    """Watches, from another thread, the time of the item that a thread works on."""

    def __init__(self, seconds: float, give_up: Callable[[int], None]) -> None:
        self._seconds = seconds
        self._give_up = give_up
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._number = 0
        self._ends_at = math.inf
        self._was_interrupted = False
        self._is_given_up = False
        threading.Thread(target=self._run, name="item-time", daemon=True).start()

    def begin(self, number: int) -> None:
        with self._lock:
            self._number, self._was_interrupted = number, False
            self._ends_at = time.monotonic() + self._seconds

    def end(self) -> bool:
        """End the watch, and return True if the time was over. Raises _Stuck if the run was given up
        meanwhile."""
        with self._lock:
            self._ends_at = math.inf
            if self._was_interrupted:
                _raise_in(self._thread, None)  # if it has not come yet
            if self._is_given_up:
                raise _Stuck
            return self._was_interrupted

    def _run(self) -> None:
        pause = max(0.01, min(0.5, self._seconds / 10))
        while not self._is_given_up:
            time.sleep(pause)
            with self._lock:
                late_seconds = time.monotonic() - self._ends_at
                if late_seconds > 0 and not self._was_interrupted:
                    self._was_interrupted = True
                    _raise_in(self._thread, ItemTimeout)
                elif late_seconds > STUCK_SECONDS:
                    self._is_given_up = True
                    self._give_up(self._number)


def _raise_in(thread: int, fault: type[BaseException] | None) -> None:
    """Raise an exception in a thread at its next step in Python code. With None, take back an exception that
    has not been raised yet."""
    given = None if fault is None else ctypes.py_object(fault)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), given)


def _item_result(number: int, seconds: float, tries: int, outcome: RunOutcome) -> ItemResult:
    fault = outcome.fault
    if outcome.ending == "succeeded":
        return number, seconds, tries, outcome.result, None
    if fault is None:
        return number, seconds, tries, None, ("stopped_unasked", "it raised Stopped without a notice", "")
    message = plain_text(fault.message, MESSAGE_CHARS)
    return number, seconds, tries, None, (fault.kind, message, plain_text(fault.traceback, TRACEBACK_CHARS))


def _size_bytes(result: ItemResult) -> int:
    return len(result[3] or b"")


def _ranges(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first number of each range without gaps, and the number after its last. `numbers` are
    sorted."""
    first = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield numbers[first], numbers[index - 1] + 1
            first = index
