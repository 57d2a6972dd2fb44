"""Batches as rows and events. What tasks that are alike have in common is made once for all of them."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpubroker_server.adapters.sql import statements as sql
from gpubroker_server.adapters.sql.rows import new_task_row, spec_head, spec_tail
from gpubroker_server.adapters.sql.rowset import Alike, Row, SetStatement, json_text
from gpubroker_server.core.domain.decisions import Fields
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Position
from gpubroker_server.core.world.event_codec import task_fields
from gpubroker_server.core.world.events import SUBMITTED, Event
from gpubroker_server.ports.store import BatchSubmission, Submission


class _First(NamedTuple):
    """What the first events of tasks that are alike have in common."""

    fields: Fields
    before: str
    """Their JSON up to the id, and behind it."""
    behind: str


class BatchRows:
    """All that a batch writes."""

    def __init__(self, batch: BatchSubmission) -> None:
        self._batch = batch
        self._firsts: dict[int, _First] = {}
        """By the identity of the submission that all are like."""
        self.blocks = list(self._blocks())
        self._heads = list(self._event_heads())

    def __len__(self) -> int:
        """How many events."""
        return len(self._heads)

    def event_rows(self, first: Position, at: Instant) -> Alike:
        heads = [(position, at, *head) for position, head in enumerate(self._heads, first)]
        return Alike(heads, (SUBMITTED, 1, self._batch.tenant, 1))

    def events(self, first: Position, at: Instant) -> Iterator[Event]:
        tenant = self._batch.tenant
        for position, submission in enumerate(self._batch.submissions, first):
            task = submission.task
            fields = {**self._firsts[id(submission.like or submission)].fields, "id": task.id}
            yield Event(Position(position), at, SUBMITTED, task.id, 1, tenant, fields, task)

    def _blocks(self) -> Iterator[tuple[SetStatement, Alike]]:
        batch = self._batch
        key, marks = batch.idempotency_key, (batch.idempotency_key, batch.body_hash)
        for alike in _by_likeness(batch.submissions):
            first = alike[0]
            ids: list[Row] = [(submission.task.id,) for submission in alike]
            task = new_task_row(first.task)[1:]
            if key is not None and first is batch.submissions[0]:
                yield sql.INSERT_TASKS, Alike(ids[:1], (*task, *marks))
                yield sql.INSERT_TASKS, Alike(ids[1:], (*task, None, None))
            else:
                yield sql.INSERT_TASKS, Alike(ids, (*task, None, None))
            yield sql.INSERT_SPECS, Alike([spec_head(submission) for submission in alike], spec_tail(first))
            for label in first.spec.labels.items():
                yield sql.INSERT_LABELS, Alike(ids, (batch.tenant, *label))
        if key is not None:
            yield sql.INSERT_BATCHES, Alike([(batch.first, batch.tenant, batch.answer)], ())

    def _event_heads(self) -> Iterator[Row]:
        for submission in self._batch.submissions:
            like = submission.like or submission
            first = self._firsts.get(id(like))
            if first is None:
                first = self._firsts[id(like)] = _first(like.task)
            task = submission.task.id
            yield task, task, f"{first.before}{task}{first.behind}"


def _by_likeness(submissions: Sequence[Submission]) -> list[list[Submission]]:
    """Those together that differ in their ids and arguments alone."""
    found: dict[Row, list[Submission]] = defaultdict(list)
    for submission in submissions:
        spec = submission.spec
        run = (spec.kind, spec.entrypoint, spec.command, spec.python, spec.working_directory)
        found[id(submission.like or submission), *run].append(submission)
    return list(found.values())


def _first(task: Task) -> _First:
    fields = task_fields(task)
    before, mark, behind = json_text(fields).partition(f'"id":"{task.id}"')
    return _First(fields, before + mark[: -len(task.id) - 1], '"' + behind)
