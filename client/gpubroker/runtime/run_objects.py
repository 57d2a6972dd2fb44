"""Reads the node's objects for one run, and makes objects of its results."""

import hashlib
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from threading import Lock
from typing import Any

from gpubroker.runtime.invoke import CannotOpen
from gpubroker.runtime.journal import Journal
from gpubroker.runtime.messages import Report, RunOrder, failed, part, wanted
from gpubroker.runtime.objects import UnreadableObject, opened_object
from gpubroker.runtime.outcome import NotStored
from gpubroker.runtime.task import RunningTask, Stopped

PART_BYTES = 4 * 2**20
"""The bytes of a result that are sent at once. The next part follows when this one is stored."""


class RunObjects:
    """Fetches and stores objects for one run. The run's thread asks and waits; other threads bring the
    answers. A question is repeated until it is answered."""

    def __init__(
        self, order: RunOrder, journal: Journal, task: RunningTask, open_shared: Callable[[Any], memoryview]
    ) -> None:
        """`open_shared` returns the bytes of an object, from what the agent sends for it."""
        self._order = order
        self._journal = journal
        self._task = task
        self._open_shared = open_shared
        self._lock = Lock()
        self._waits: dict[str, tuple[Future[Any], Report]] = {}
        """Object id -> the future answer, and the question."""
        task.call_on_stop(self._cancel)

    def fetch(self, id: str, *, unpickles: bool | None = None) -> Any:
        """Return the opened object. `unpickles` says whether it may be unpickled; by default only for runs of
        functions. Raises CannotOpen, or Stopped if the run has to stop."""
        shared, failure = self._answer_to(id, wanted(self._order.key, id))
        if failure is not None:
            raise CannotOpen(failed(*failure))
        # Whoever may submit a function may run any code. An entrypoint is what the operator allows, so its
        # objects are never unpickled.
        unpickles = self._order.kind == "function" if unpickles is None else unpickles
        try:
            return opened_object(self._open_shared(shared), unpickles=unpickles)
        except UnreadableObject as fault:
            message = f"object {id} cannot be opened: {fault}"
            raise CannotOpen(failed("object_unreadable", message)) from None

    def store(self, data: bytes) -> str:
        """Store the bytes as an object of the run's tenant, and return its id. Raises NotStored or
        Stopped."""
        digest, stored_bytes = hashlib.sha256(data).hexdigest(), -1
        while stored_bytes < len(data):
            begin = max(0, stored_bytes)
            question = part(self._order.key, digest, len(data), begin, data[begin : begin + PART_BYTES])
            stored_bytes, failure = self._answer_to(digest, question)
            if failure:
                raise NotStored(failure)
        return digest

    def take(self, id: str, shared: Any, failure: tuple[str, str] | None) -> None:
        self._answer(id, "wanted", (shared, failure))

    def answer_part(self, digest: str, stored_bytes: int, failure: str) -> None:
        self._answer(digest, "part", (stored_bytes, failure))

    def ask_again(self) -> None:
        """Repeat all open questions, because an earlier agent may not have passed on the question or its
        answer."""
        with self._lock:
            questions = [question for _, question in self._waits.values()]
        for question in questions:
            self._journal.add(question)

    def _answer_to(self, id: str, question: Report) -> Any:
        with self._lock:
            pending = self._waits.get(id)
            is_asked = pending is not None and pending[1][0] == question[0]  # by another thread of the run
            answer = pending[0] if pending is not None and is_asked else Future[Any]()
            if not is_asked:
                self._waits[id] = answer, question
        try:
            if not is_asked:
                self._journal.add(question)
            if self._task.should_stop:
                raise Stopped
            return answer.result()
        except CancelledError:
            raise Stopped from None
        finally:
            with self._lock:
                if self._waits.get(id, (None,))[0] is answer:
                    del self._waits[id]

    def _answer(self, id: str, kind: str, value: Any) -> None:
        with self._lock:
            answer, question = self._waits.get(id, (None, ("",)))
        if answer is not None and question[0] == kind and answer.set_running_or_notify_cancel():
            answer.set_result(value)

    def _cancel(self) -> None:
        with self._lock:
            for answer, _ in self._waits.values():
                answer.cancel()
