"""The objects of a worker of a set: they are made once, within a time limit, and checked repeatedly."""

import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from gpubroker.runtime.invoke import CannotOpen
from gpubroker.runtime.messages import TRACEBACK_BYTES, RunOutcome, failed
from gpubroker.runtime.outcome import describe, raised
from gpubroker.runtime.task import RunningTask, enter_task

Objects = Mapping[str, Any]
"""Role -> object; the object of the set itself has no name."""


class SetObjects:
    """Makes and checks the objects of a worker of a set. One thread does both, because what a constructor
    makes may belong to its thread."""

    def __init__(
        self,
        make: Callable[[], Objects],
        result_of: Callable[[Any], Any],
        task: RunningTask,
        terms: Mapping[str, Any],
    ) -> None:
        """`result_of` returns the value that a method returned, or that its coroutine returns."""
        self._make = make
        self._result_of = result_of
        self._start_seconds: float | None = terms.get("start_seconds")
        self._health: Mapping[str, Any] | None = terms.get("health")
        self._thread = ThreadPoolExecutor(1, "objects", enter_task, (task,))
        self._ident = 0
        """The identifier of the thread that makes and checks the objects."""
        self._made: Objects = {}
        self._failures = 0
        self._due_at = 0.0
        self._check: Future[str] | None = None
        self._began_at = 0.0

    def made(self) -> Objects | RunOutcome:
        """Return the objects, or the outcome of the run if they could not be made."""
        making = self._thread.submit(self._made_or_outcome)
        wait([making], self._start_seconds)
        if making.done():
            return making.result()
        message = (
            f"its objects were not made within {self._start_seconds:g} s; the traceback shows where it was. "
            "If they need longer, form the set with more start_timeout_seconds"
        )
        stack = traceback.format_stack(sys._current_frames().get(self._ident))
        return failed("start_timeout", message, "".join(stack)[-TRACEBACK_BYTES:])

    def _made_or_outcome(self) -> Objects | RunOutcome:
        self._ident = threading.get_ident()
        try:
            self._made = self._make()
        except CannotOpen as refusal:
            return refusal.outcome
        except BaseException as fault:
            return raised(fault)
        return self._made

    def why_unhealthy(self, now: float) -> str:
        """Return why the worker cannot go on; empty while it can. Begin a check if one is due."""
        terms = self._health
        if terms is None:
            return ""
        if self._check is None:
            if now >= self._due_at:
                self._check, self._began_at = self._thread.submit(self._fault, terms["method"]), now
            return ""
        is_late = now - self._began_at > terms["timeout_seconds"]
        if not self._check.done() and not is_late:
            return ""
        late = f"it did not answer within {terms['timeout_seconds']:g} s"
        fault = self._check.result() if self._check.done() else late
        self._due_at = now + terms["period_seconds"]
        self._failures = self._failures + 1 if fault else 0
        if self._check.done():
            self._check = None
        else:
            self._began_at = now  # the same check counts again when its time is over once more
        if self._failures < terms["failures"]:
            return ""
        return f"{terms['method']} failed {self._failures} times in a row; the last time: {fault}"

    def _fault(self, name: str) -> str:
        """Check the objects of all roles that have the method, and return the first fault; empty if there is
        none. The object of the set itself must have the method."""
        for role, made in self._made.items():
            about = f"role {role}: " if role else ""
            try:
                if role and not hasattr(made, name):
                    continue
                if self._result_of(getattr(made, name)()) == False:  # noqa: E712  # numpy's False too
                    return f"{about}it returned False"
            except BaseException as fault:
                return about + describe(fault)
        return ""
