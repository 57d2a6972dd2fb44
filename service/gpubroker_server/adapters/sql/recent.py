"""What this process wrote lately and nobody can change any more: what a task runs, and how it ended.

A start needs the one and a waiting client the other, moments after they were written; reading them back
would cost two threads and a query each.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from gpubroker_server.adapters.sql.group import Change, Unit
from gpubroker_server.core.domain.decisions import Outcome
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.ports.store import CommitVerdict, RunSpec, StoredResult, Submission, TaskRecord

MOST_BYTES = 32 * 2**20
_ENTRY_BYTES = 2048
"""About what an entry takes besides its arguments and its result."""


@dataclass(slots=True)
class _Entry:
    spec: RunSpec
    size_bytes: int
    ended: tuple[Task, Outcome] | None = None


class Recent:
    """Lives on the event loop. Oldest first out; whoever finds nothing here asks the database."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._entries: OrderedDict[TaskId, _Entry] = OrderedDict()
        self._size_bytes = 0

    def note_submission(self, submission: Submission) -> None:
        """Before it is written: a start may follow before its writer is answered."""
        spec = submission.spec
        entry = _Entry(spec, _ENTRY_BYTES + len(spec.arguments))
        if self._entries.setdefault(submission.task.id, entry) is entry:
            self._grow(entry.size_bytes)

    def forget(self, task: TaskId) -> None:
        """It was not stored after all."""
        if (entry := self._entries.pop(task, None)) is not None:
            self._size_bytes -= entry.size_bytes

    def note_ends(self, units: Sequence[Unit]) -> None:
        """Of committed decisions. A task whose outcome came earlier than its end is left to the database."""
        for unit in units:
            if isinstance(unit, Change) and unit.answer is CommitVerdict.COMMITTED:
                outcome = unit.decision.outcome
                for write in unit.decision.tasks:
                    entry = self._entries.get(write.task.id)
                    if entry and outcome and write.task.is_terminal and outcome.result_digest is None:
                        entry.ended = (write.task, outcome)
                        entry.size_bytes += len(outcome.result or b"") + len(outcome.log_tail)
                        self._grow(len(outcome.result or b"") + len(outcome.log_tail))

    def spec(self, task: TaskId) -> RunSpec | None:
        entry = self._entries.get(task)
        return None if entry is None else entry.spec

    def record(self, task: TaskId) -> TaskRecord | None:
        entry = self._entries.get(task)
        if entry is None or entry.ended is None:
            return None
        row, outcome = entry.ended
        failure = None if outcome.failure is None else asdict(outcome.failure)
        return TaskRecord(row, entry.spec, failure, has_result=outcome.result is not None)

    def result(self, task: TaskId) -> StoredResult | None:
        entry = self._entries.get(task)
        if entry is None or entry.ended is None:
            return None
        _, outcome = entry.ended
        failure = None if outcome.failure is None else asdict(outcome.failure)
        return StoredResult(
            ending=outcome.ending,
            format=outcome.result_format,
            data=outcome.result,
            digest=None,
            failure=failure,
            log_tail=outcome.log_tail,
        )

    def _grow(self, more_bytes: int) -> None:
        self._size_bytes += more_bytes
        while self._size_bytes > self._most_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._size_bytes -= oldest.size_bytes
