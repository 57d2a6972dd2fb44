"""Convert tasks, leases and other values to rows and back. A column that no statement searches may hold
JSON."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from sys import intern
from typing import Any

from msgspec import Struct, json
from msgspec.structs import astuple, fields, replace

from gpubroker_server.adapters.sql import statements as sql
from gpubroker_server.adapters.sql import tables
from gpubroker_server.adapters.sql.columns import columns_of, row_writer
from gpubroker_server.adapters.sql.session import Alike, Row, SetStatement, json_text
from gpubroker_server.adapters.sql.system_tables import check_reader, token
from gpubroker_server.core.domain.decisions import Decision, Outcome, Request
from gpubroker_server.core.domain.device import Device, Node
from gpubroker_server.core.domain.estimates import Observation, Sketch, SketchKey, What
from gpubroker_server.core.domain.holders import Gang, Model, Run
from gpubroker_server.core.domain.lease import Lease, LeaseState, Pledge
from gpubroker_server.core.domain.orders import Checkpointed
from gpubroker_server.core.domain.submission import RunSpec, told_variables
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant, Position
from gpubroker_server.core.world.events import SUBMITTED, Event, NewEvent, task_of
from gpubroker_server.core.world.payload import (
    COMMON_FIELDS,
    StoredTask,
    fields_of_holder,
    holder_with,
    payload_of,
    released_members,
)
from gpubroker_server.ports.store import AdmittedTask, BatchSubmission, TokenRow

Written = tuple[SetStatement, Row]
_COUNTS = json.Decoder(tuple[tuple[int, int], ...])


def event_row(event: NewEvent) -> Row:
    """Return the row of an event, without position and time, which are the first and the last column of
    `statements.EVENT_IN`."""
    return (
        event.key, task_of(event), json_text(event.payload), event.kind, event.version, event.tenant,
        event.reader,
    )  # fmt: skip


def rows_of_submission(submission: AdmittedTask) -> Iterator[Written]:
    task, key = submission.task, submission.idempotency_key
    marks = (key, submission.body_hash) if key is not None else (None, None)
    yield sql.INSERT_TASKS, (*task_head(submission), *task_tail(task), *marks)
    yield sql.INSERT_SPECS, (*spec_head(submission), *spec_tail(submission))
    for name, value in submission.spec.labels.items():
        yield sql.INSERT_LABELS, (task.id, task.tenant, name, value)


task_head = attrgetter("task.id", "task.queued_bytes")
"""Returns the columns of `task` that differ among submissions that differ only in their arguments."""
spec_head = attrgetter("task.id", "spec.arguments", "spec.arguments_digest")
"""Returns the columns of `task_spec` that differ among such submissions."""


def task_tail(task: Task) -> Row:
    """Return the last columns of a new task, without its idempotency key and the hash of its body. Raises
    ValueError for a task that is not new, because the row has the defaults of all columns that change
    later."""
    if task.state is not TaskState.PENDING or task.version != 1:
        raise ValueError(f"task {task.id} is {task.state} in version {task.version}; submit a new one")
    return _new_task(task)


def home_text(model: Model) -> str:
    return "/".join(model.home)


def _holder_columns(task: Task) -> Row:
    """Return the array, the external holder, the model and the home of a new task."""
    if isinstance(task.holder, Run):
        return (None, None, None, None)  # most tasks are runs
    holder_fields = fields_of_holder(task.holder)
    home = None if holder_fields.model is None else home_text(holder_fields.model)
    return (holder_fields.array, _text(holder_fields.external), _text(holder_fields.model), home)


def _text(value: Struct | None) -> str | None:
    return None if value is None else json_text(value)


def spec_tail(submission: AdmittedTask) -> Row:
    return (submission.task.tenant, *_new_spec(submission.spec))


def _env(spec: RunSpec) -> Row:
    variables = {**spec.env, **told_variables(spec)} if spec.is_told_more else spec.env
    return (json_text(variables) if variables else "{}",)


# The columns are columns of StoredTask. Their values are the task's fields with the same names.
_new_task = row_writer(StoredTask, sql.TASK_IN[2:-6], _holder_columns)
_new_spec = row_writer(RunSpec, sql.SPEC_IN[4:-1], _env)


class BatchRows:
    """The rows and events of a batch. The common part of equal tasks is made once for all of them."""

    def __init__(self, batch: BatchSubmission) -> None:
        self._batch = batch
        self._texts: dict[int, tuple[str, str]] = {}
        """`id` of a submission that others resemble (`AdmittedTask.like`) -> the JSON of its task before and
        after the task id, without `queued_bytes`."""
        self.blocks = list(self._blocks())
        self._heads = list(self._event_heads())

    def __len__(self) -> int:
        """Return the number of events."""
        return len(self._heads)

    def event_rows(self, first: Position, at: Instant) -> Alike:
        heads = [(position, *head) for position, head in enumerate(self._heads, first)]
        return Alike(heads, (SUBMITTED, 1, self._batch.tenant, 1, at))

    def events(self, first: Position, at: Instant) -> Iterator[Event]:
        tenant = self._batch.tenant
        for position, submission in enumerate(self._batch.submissions, first):
            task = submission.task
            yield Event(Position(position), at, SUBMITTED, task.id, 1, tenant, payload_of(task), task)

    def _blocks(self) -> Iterator[tuple[SetStatement, Alike]]:
        batch = self._batch
        key, marks = batch.idempotency_key, (batch.idempotency_key, batch.body_hash)
        for group in _by_likeness(batch.submissions):
            first = group[0]
            ids: list[Row] = [(submission.task.id,) for submission in group]
            heads = [*map(task_head, group)]
            task = task_tail(first.task)
            # The first task of the batch alone has the idempotency key, which is unique.
            if key is not None and first is batch.submissions[0]:
                yield sql.INSERT_TASKS, Alike(heads[:1], (*task, *marks))
                yield sql.INSERT_TASKS, Alike(heads[1:], (*task, None, None))
            else:
                yield sql.INSERT_TASKS, Alike(heads, (*task, None, None))
            yield sql.INSERT_SPECS, Alike([*map(spec_head, group)], spec_tail(first))
            for label in first.spec.labels.items():
                yield sql.INSERT_LABELS, Alike(ids, (batch.tenant, *label))
        if batch.answer:
            yield sql.INSERT_BATCHES, Alike([(batch.first, batch.tenant, batch.answer)], ())

    def _event_heads(self) -> Iterator[Row]:
        for submission in self._batch.submissions:
            prototype = submission.like or submission
            texts = self._texts.get(id(prototype))
            if texts is None:
                texts = self._texts[id(prototype)] = _around_id(prototype.task)
            task, size = submission.task.id, submission.task.queued_bytes
            yield task, task, f'{texts[0]}{task}","queued_bytes":{size}{texts[1]}'


def _by_likeness(submissions: Sequence[AdmittedTask]) -> list[list[AdmittedTask]]:
    """Return groups of submissions that differ only in ids and arguments."""
    groups: dict[Row, list[AdmittedTask]] = defaultdict(list)
    for submission in submissions:
        spec = submission.spec
        run = (spec.kind, spec.entrypoint, spec.command, spec.objects, spec.python, spec.working_directory)
        groups[id(submission.like or submission), *run].append(submission)
    return list(groups.values())


def _around_id(task: Task) -> tuple[str, str]:
    """Return the JSON of the task's payload before and after the id, without `queued_bytes`."""
    # A payload leaves out a field that has its default, which is 0.
    before, mark, behind = json_text(payload_of(replace(task, queued_bytes=0))).partition(f'"id":"{task.id}"')
    return before + mark[: -len(task.id) - 1], behind


def row_of_request(request: Request) -> Written:
    return sql.INSERT_REQUESTS, _request(request)


def rows_of_decision(decision: Decision) -> Iterator[Written]:
    """Yield the rows of a decision, without leased memory, counts of finished tasks and estimates, which a
    group adds up over all its decisions.

    A decision with an outcome or a checkpoint also writes the task, from which the tenant is taken.
    """
    for node in decision.nodes:
        yield sql.WRITE_NODES, _node(node)
    for device in decision.devices:
        yield sql.WRITE_DEVICES, _device(device)
    for write in decision.tasks:
        yield sql.MOVE_TASKS, _moved_task(write.task)
    for lease in decision.leases:
        if lease.version == 1:
            yield sql.INSERT_LEASES, _new_lease(lease)
        else:
            yield sql.MOVE_LEASES, _moved_lease(lease)
    for written in decision.pledges:
        pledge = written.pledge
        if written.end is not None:
            yield sql.END_PLEDGES, (pledge.preemptor, pledge.device)
        else:
            yield sql.MAKE_PLEDGES, _pledge(pledge)
    tenants = {write.task.id: write.task.tenant for write in decision.tasks}
    if decision.outcome is not None:
        yield sql.WRITE_OUTCOMES, _outcome_row(decision.outcome, tenants[decision.outcome.task])
    if decision.checkpoint is not None:
        yield sql.WRITE_CHECKPOINTS, _checkpoint_row(decision.checkpoint, tenants[decision.checkpoint.task])
        yield sql.trim_checkpoints, (decision.checkpoint.task,)
    for page in decision.items:
        yield sql.INSERT_ITEM_PAGES, _page_values(page)
    for request in decision.requests_done:
        yield sql.DELETE_REQUESTS, (request,)
    for pause in decision.paused:
        yield sql.MAKE_PAUSES, (pause.queue, pause.at, pause.actor, pause.reason)
    for pause in decision.resumed:
        yield sql.END_PAUSES, (pause.queue,)
    for row in decision.worker_sets:
        workers = row.workers
        if row.what == "over":
            yield sql.END_WORKER_SETS, (workers.id,)
        else:
            yield sql.WRITE_WORKER_SETS, (workers.id, workers.tenant, json_text(workers))
    for stream in decision.streams:
        if stream.is_untold:
            yield sql.REMOVE_STREAMS, (stream.name,)
        else:
            yield sql.WRITE_STREAMS, astuple(stream)
    for note in decision.audit:
        yield sql.INSERT_AUDIT, (note.at, note.tenant, note.actor, note.action, note.subject, note.reason)
    for topic in decision.forgotten:
        yield sql.FORGET_ESTIMATES, (topic.tenant, topic.subject, topic.kind, topic.what.value)


def estimate_row(lesson: Observation) -> Row:
    topic, counts = lesson.topic, json_text(lesson.sketch.counts)
    return (topic.tenant, topic.subject, topic.kind, topic.what.value, lesson.at, counts)


def estimate_of_row(row: Sequence[Any]) -> tuple[SketchKey, Sketch]:
    """Return the topic of an estimate and its sketch. `row` has the columns of `reads.ESTIMATE`."""
    tenant, subject, kind, what, counts = row
    return SketchKey(tenant, subject, kind, What(what)), Sketch(_COUNTS.decode(counts))


_page_values = attrgetter(*(column.name for column in tables.item_page.c))


def _behind_moved(task: Task) -> Row:
    ended_as = str(task.state) if task.is_terminal else None
    model = members = home = None
    match task.holder:
        case Gang(ranks) if ranks:
            members = json_text(released_members(ranks))
        case Model() as terms:
            model, home = json_text(terms), home_text(terms)
        case _:
            pass  # The other holders have nothing that changes outside the common part.
    return model, members, home, ended_as is not None, ended_as


def _is_released(lease: Lease) -> Row:
    return (lease.state is LeaseState.RELEASED,)


_moved_task = row_writer(StoredTask, sql.TASK_MOVED[:-5], _behind_moved)
_new_lease = row_writer(Lease, sql.LEASE_IN[:-1], _is_released)
_moved_lease = row_writer(Lease, sql.LEASE_MOVED[:-1], _is_released)
_node = row_writer(Node, (column.name for column in tables.node.c))
_device = row_writer(Device, sql.DEVICE_IN)
_pledge = row_writer(Pledge, (column.name for column in tables.pledge.c))
_request = row_writer(Request, (column.name for column in tables.request.c))
token_row = row_writer(TokenRow, (column.name for column in token.c))


def _outcome_row(outcome: Outcome, tenant: str) -> Row:
    failure = None if outcome.failure is None else json_text(outcome.failure)
    return (
        outcome.task, outcome.fence, tenant, outcome.ending, outcome.at, outcome.result,
        outcome.result_digest, outcome.result_format, failure, outcome.log_tail,
    )  # fmt: skip


def _checkpoint_row(saved: Checkpointed, tenant: str) -> Row:
    size_bytes = len(saved.data) if saved.data is not None else 0
    return (saved.task, saved.fence, saved.sequence, tenant, saved.at, saved.digest, size_bytes, saved.uri)


def event_of_row(row: Sequence[Any]) -> Event:
    """Return the event that a row holds. `row` has the columns of `statements.EVENT`. Raises LogOutgrown for
    an event of a newer form."""
    position, at, kind, key, version, tenant, text, reader = row
    check_reader(reader)
    return Event(position, at, kind, key, version, tenant, text)


def task_of_row(row: Iterable[Any]) -> Task:
    """Return the task that a row holds. `row` has the columns of `reads.TASK`: the common fields, then the
    fields of holders."""
    values = list(row)
    for place in _REPEATED:
        values[place] = intern(values[place])
    for place, read, empty in _READ:
        value = values[place]
        values[place] = empty if value is None else read(value)
    values[_COMMON:] = [holder_with(values[_DEMAND], *values[_COMMON:])]
    return Task(*values)


_COMMON = len(COMMON_FIELDS)
_DEMAND = COMMON_FIELDS.index("demand")
_places = {field.name: place for place, field in enumerate(fields(StoredTask))}
_REPEATED = tuple(_places[name] for name in ("tenant", "name", "stream", "subject"))
"""The places of the columns whose texts many tasks share. Each text is kept in memory once (`bench
restart`)."""
_READ = tuple(
    (_places[field.name], read, field.default if isinstance(field.default, tuple) else None)
    for field in fields(StoredTask)
    if (read := columns_of(StoredTask)[field.name][0]) is not None
)
"""The columns that do not hold the field itself: each with its place, the function that reads it, and the
value that NULL stands for."""
