"""The process of a worker of a set, which makes an object once and calls its methods."""

import inspect
import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import cloudpickle

from gpubroker.runtime.invoke import CannotOpen, Invocation, opened, with_objects
from gpubroker.runtime.journal import AT_ONCE, Journal
from gpubroker.runtime.messages import (
    MESSAGE_CHARS,
    RunOrder,
    RunOutcome,
    failed,
    loaded,
    plain_text,
)
from gpubroker.runtime.objects import ObjectRef
from gpubroker.runtime.outcome import describe, raised, succeeded
from gpubroker.runtime.run_objects import RunObjects
from gpubroker.runtime.set_objects import Objects, SetObjects
from gpubroker.runtime.task import RunningTask, Stopped, enter_task

if TYPE_CHECKING:
    import asyncio  # half of the time of the imports of an environment's process, so used ones import it

WORKER_SET_VARIABLE = "GPUBROKER_WORKER_SET"
"""The variable that marks the workers of sets: JSON with how each takes calls."""

DONE, FAILED, REFUSED, LATE = "done", "failed", "refused", "late"
"""The endings of a call. The method of a refused or late call has not begun."""
Answer = tuple[Any, ...]
"""One of (done, result, seconds), (failed, kind, message, traceback), (refused, reason) and (late,
reason)."""
IS_READY: Answer = (DONE, b"null", 0.0)
IS_LEAVING: Answer = (REFUSED, "the worker is leaving")
IS_LATE: Answer = (LATE, "its time was over before its turn came")

SENT_SECONDS = 1.0
"""The time in which an answer is surely sent. Ray sends it after its method has returned, and doesn't say
when; the process of a run that has ended is killed."""
TELL_SECONDS = 0.5
"""The time between two looks at the load of the process. A load that has changed is reported."""
STILL_SECONDS = 10.0
"""The time after which a load that has not changed is reported again."""
TOLD_CPU_PERCENT = 5.0
TRACEBACK_CHARS = 16_384
PICKLED = "cloudpickle"


class _Leaving(Exception):
    """The worker was asked to leave before the method was called."""


def is_worker(order: RunOrder) -> bool:
    return WORKER_SET_VARIABLE in order.env


class SetWorker:
    """A worker of a set. Its process creates it, `work` is its run and has a thread of its own, and calls may
    come from any other thread."""

    def __init__(self, order: RunOrder, journal: Journal, task: RunningTask, objects: RunObjects) -> None:
        terms = json.loads(order.env[WORKER_SET_VARIABLE])
        self._order = order
        self._journal = journal
        self._task = task
        self._objects = objects
        self._roles: Mapping[str, Mapping[str, Any]] = terms.get("roles") or {}
        self._max_concurrency: int = terms["max_concurrency"]
        self._threads = ThreadPoolExecutor(self._max_concurrency, "call", enter_task, (task,))
        self._lock = threading.Lock()
        self._asked: set[Future[Answer]] = set()
        """The requests that ask whether the objects are made."""
        self._waiting: dict[Future[Answer], Callable[[], Answer]] = {}
        """The calls that have not begun, in order. A call that is given up is removed with its arguments."""
        self._running = self._answered = 0
        self._is_leaving = False
        self._answered_at = -inf
        self._set_objects = SetObjects(self._make, self._result_of, task, terms)
        self._made: Objects = {}
        """The objects, once they are made."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop on which coroutines run."""
        self._news = threading.Event()

    def work(self) -> RunOutcome:
        """Answer calls until the worker has to stop, or is found to be unhealthy."""
        self._task.call_on_stop(self._news.set)
        try:
            made = self._set_objects.made()
            if isinstance(made, RunOutcome):
                return made
            with self._lock:
                self._made, self._asked, questions = made, set(), self._asked
                self._begin()
            for question in questions:
                _settle(question, IS_READY)
            return self._tend()
        except BaseException as fault:
            return raised(fault)
        finally:
            self._leave()

    async def call(self, role: str, method: str, form: str, arguments: bytes, seconds: float) -> Answer:
        """Call a method and return the answer. Without a method, the answer comes as soon as the objects are
        made. A call that has not begun within `seconds` never begins; one that has begun is answered when it
        ends."""
        import asyncio

        call = self.submit(role, method, form, arguments, seconds)
        answered = asyncio.wrap_future(call)
        await asyncio.wait({answered}, timeout=seconds)
        return IS_LATE if call.cancel() else await answered

    def submit(self, role: str, method: str, form: str, arguments: bytes, seconds: float) -> Future[Answer]:
        """Return the future answer of a call, which stays in the queue until its turn comes or it is
        cancelled."""
        until = time.monotonic() + seconds
        call: Future[Answer] = Future()
        with self._lock:
            if self._is_leaving:
                _settle(call, IS_LEAVING)
            elif method:
                self._waiting[call] = partial(self._answer, role, method, form, arguments, until)
                self._begin()
            elif self._made:
                _settle(call, IS_READY)
            else:
                self._asked.add(call)
        call.add_done_callback(self._forget)
        return call

    def _make(self) -> Objects:
        """Make the object of each role. Raises CannotOpen, and what a constructor raises."""
        objects = {"": self._object_of(self._order)}
        for role, run in self._roles.items():
            arguments = json.dumps({"args": run["args"], "kwargs": run["kwargs"]}).encode()
            order = {**self._order.to_wire(), "kind": "entrypoint", "entrypoint": run["entrypoint"]}
            objects[role] = self._object_of(RunOrder(**{**order, "arguments": arguments}))
        return objects

    def _object_of(self, order: RunOrder) -> Any:
        call = with_objects(opened(order), self._objects.fetch)
        return call.function(*call.args, **call.kwargs)

    def _forget(self, call: Future[Answer]) -> None:
        if call.cancelled():
            with self._lock:
                self._waiting.pop(call, None)
                self._asked.discard(call)

    def _begin(self) -> None:
        """Begin as many waiting calls as may run; the caller holds the lock. No call waits in the thread
        pool, because the pool would keep its arguments after the call was given up."""
        while self._made and self._waiting and self._running < self._max_concurrency:
            call = next(iter(self._waiting))
            answer = self._waiting.pop(call)
            if call.set_running_or_notify_cancel():
                self._running += 1
                self._threads.submit(self._run, call, answer)

    def _run(self, call: Future[Answer], answer: Callable[[], Answer]) -> None:
        answered = answer()
        with self._lock:
            self._running -= 1
            self._answered += 1
            self._answered_at = time.monotonic()
            self._begin()
        call.set_result(answered)

    def _answer(self, role: str, method: str, form: str, arguments: bytes, until: float) -> Answer:
        began = time.monotonic()
        if began > until:
            return IS_LATE
        try:
            outcome = self._outcome(role, method, form, arguments)
        except _Leaving:
            return IS_LEAVING
        except BaseException as fault:
            outcome = raised(fault)
        seconds = time.monotonic() - began
        if outcome.ending == "succeeded":
            return DONE, outcome.result, seconds
        failure = outcome.fault
        if failure is None:
            return FAILED, "stopped_unasked", "it raised Stopped, which only a run may do", ""
        message = plain_text(failure.message, MESSAGE_CHARS)
        return FAILED, failure.kind, message, plain_text(failure.traceback, TRACEBACK_CHARS)

    def _outcome(self, role: str, method: str, form: str, arguments: bytes) -> RunOutcome:
        """Call the method and return its outcome. Raises what user code raises: the method, a property, or
        code that opens arguments or writes the result."""
        if role not in self._made:
            roles = ", ".join(sorted(filter(None, self._made))) or "none"
            return _not_called("no_such_role", f"there is no role {role!r}; roles of this set: {roles}")
        made = self._made[role]
        function = None if method.startswith("_") else getattr(made, method, None)
        if not callable(function):
            return _not_called("no_such_method", f"{type(made).__qualname__} has no public method {method!r}")
        try:
            args, kwargs = _arguments_of(form, arguments)
            # Whoever may send a pickle may run any code, also in a set of an entrypoint.
            fetch = partial(self._objects.fetch, unpickles=form == PICKLED)
            call = with_objects(Invocation(function, tuple(args), dict(kwargs)), fetch)
        except CannotOpen as fault:
            return fault.outcome
        except Stopped:
            raise _Leaving from None
        except BaseException as fault:
            return _not_called("corrupt_arguments", f"the arguments cannot be opened: {describe(fault)}")
        value = self._result_of(function(*call.args, **call.kwargs))
        outcome = succeeded(value, form, self._order.result_limit_bytes, self._objects.store)
        if outcome.result_format != "object" or form != PICKLED:
            return outcome
        named = ObjectRef(json.loads(outcome.result or b"")["object"])
        return replace(outcome, result=cloudpickle.dumps(named))

    def _result_of(self, value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value
        import asyncio

        return asyncio.run_coroutine_threadsafe(_awaited(value), self._event_loop()).result()

    def _event_loop(self) -> "asyncio.AbstractEventLoop":
        """Return the event loop of all calls, since what a coroutine makes may belong to its loop."""
        import asyncio

        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="coroutines", daemon=True).start()
            return self._loop

    def _tend(self) -> RunOutcome:
        """Report the load and check the health until the run has to stop."""
        reported, told_at, cpu, looked_at = (-1, -1, 0.0), 0.0, time.process_time(), time.monotonic()
        while not self._task.should_stop:
            self._news.wait(TELL_SECONDS)
            now, used = time.monotonic(), time.process_time()
            percent = 100.0 * (used - cpu) / max(now - looked_at, 1e-6)
            cpu, looked_at = used, now
            with self._lock:
                load = (self._running, len(self._waiting), percent)
                answered = self._answered
            is_new = load[:2] != reported[:2] or abs(percent - reported[2]) >= TOLD_CPU_PERCENT
            if is_new or now - told_at >= STILL_SECONDS:
                reported, told_at = load, now
                self._journal.note(self._order.key, loaded(self._order.key, *load, answered), AT_ONCE)
            if fault := self._set_objects.why_unhealthy(now):
                return failed("unhealthy", fault)
        return RunOutcome("stopped")

    def _leave(self) -> None:
        """Refuse the calls that have not begun. Those that have begun end within the grace period."""
        with self._lock:
            self._is_leaving = True
            refused = [*self._asked, *self._waiting]
            self._asked.clear()
            self._waiting.clear()
        for call in refused:
            _settle(call, IS_LEAVING)
        self._threads.shutdown(wait=self._task.should_stop)
        if self._task.should_stop:
            time.sleep(max(0.0, self._answered_at + SENT_SECONDS - time.monotonic()))


def _not_called(kind: str, message: str) -> RunOutcome:
    """Return a failure of a kind that ends a call but never the run."""
    return failed(kind, message)


async def _awaited(value: Any) -> Any:
    return await value


def _arguments_of(form: str, arguments: bytes) -> tuple[Any, Any]:
    if form == PICKLED:
        args, kwargs = cloudpickle.loads(arguments)
        return args, kwargs
    given = json.loads(arguments or b"{}")
    return given.get("args", ()), given.get("kwargs", {})


def _settle(call: Future[Answer], answer: Answer) -> None:
    if call.set_running_or_notify_cancel():
        call.set_result(answer)
