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
"""The bytes of a result that are sent at once; the next part follows when this one is stored."""


class RunObjects:
    """The run's thread asks and waits; other threads bring the answers. A question is asked again until it is
    answered."""

    def __init__(
        self, order: RunOrder, journal: Journal, task: RunningTask, open_shared: Callable[[Any], memoryview]
    ) -> None:
        """`open_shared`: the bytes of an object, from what the agent gives for it."""
        self._order = order
        self._journal = journal
        self._task = task
        self._open_shared = open_shared
        self._lock = Lock()
        self._waits: dict[str, tuple[Future[Any], Report]] = {}
        """Object id -> the answer, and the question."""
        task.call_on_stop(self._cancel)

    def fetch(self, id: str, *, unpickles: bool | None = None) -> Any:
        """The object, opened; `unpickles`, if it is not the run's kind that says so. Raises CannotOpen, or
        Stopped if the run has to stop instead."""
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
        """The id of a new object of the run's tenant. Raises NotStored, Stopped."""
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
        """An earlier agent may not have passed the question on, or its answer."""
        with self._lock:
            questions = [question for _, question in self._waits.values()]
        for question in questions:
            self._journal.add(question)

    def _answer_to(self, id: str, question: Report) -> Any:
        with self._lock:
            asked = self._waits.get(id)
            is_asked = asked is not None and asked[1][0] == question[0]  # by another thread of the run
            answer = asked[0] if asked is not None and is_asked else Future[Any]()
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
