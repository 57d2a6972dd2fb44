"""Tasks, leases and the other values as rows, and back. Columns hold JSON where no statement reads it."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, fields
from functools import lru_cache
from operator import attrgetter
from sys import intern
from typing import Any, NamedTuple

from pydantic_core import from_json

from gpubroker_server.adapters.sql import statements as sql
from gpubroker_server.adapters.sql import tables
from gpubroker_server.adapters.sql.session import Alike, Row, SetStatement, json_text
from gpubroker_server.adapters.sql.system_tables import check_reader
from gpubroker_server.core.domain.decisions import Decision, Fields, Outcome, Request
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.device import Node
from gpubroker_server.core.domain.estimates import Observation, Sketch, SketchKey, What
from gpubroker_server.core.domain.lease import HolderKind, Lease, LeaseState, Pledge
from gpubroker_server.core.domain.orders import Checkpointed
from gpubroker_server.core.domain.submission import WorkerSet, worker_set_from
from gpubroker_server.core.domain.task import HOT_FIELDS, StopReason, Task, TaskState
from gpubroker_server.core.domain.units import Instant, Position
from gpubroker_server.core.domain.values import changed
from gpubroker_server.core.world.event_codec import (
    after_fields,
    after_from,
    demand_fields,
    demand_from,
    external_fields,
    external_from,
    members_fields,
    members_from,
    model_fields,
    model_from,
    task_fields,
)
from gpubroker_server.core.world.events import SUBMITTED, Event, NewEvent, task_of
from gpubroker_server.ports.store import BatchSubmission, RunSpec, Submission, TokenRow

Written = tuple[SetStatement, Row]


@lru_cache(4096)
def demand_of_text(text: str) -> Demand:
    """Many tasks have few demands; a queue keeps each once, which `bench restart` shows."""
    return demand_from(from_json(text))


@lru_cache(4096)
def demand_text(demand: Demand) -> str:
    """Many tasks have few demands, which `bench accept` notices."""
    return json_text(demand_fields(demand))


def event_row(event: NewEvent) -> Row:
    """Without position and time, the first two columns of `statements.EVENT_IN`."""
    fields = json_text(event.fields)
    return (event.key, task_of(event), fields, event.kind, event.version, event.tenant, event.reader)


def rows_of_submission(submission: Submission) -> Iterator[Written]:
    task, key = submission.task, submission.idempotency_key
    marks = (key, submission.body_hash) if key is not None else (None, None)
    yield sql.INSERT_TASKS, (*task_head(task), *task_tail(task), *marks)
    yield sql.INSERT_SPECS, (*spec_head(submission), *spec_tail(submission))
    for name, value in submission.spec.labels.items():
        yield sql.INSERT_LABELS, (task.id, task.tenant, name, value)


def task_head(task: Task) -> Row:
    """The columns that differ among the tasks of a batch that run the same with other arguments."""
    return (task.id, task.queued_bytes)


def task_tail(task: Task) -> Row:
    """Without key and hash of the body, the last two columns."""
    if task.state is not TaskState.PENDING or task.version != 1:
        raise ValueError(f"task {task.id} is {task.state} in version {task.version}; submit a new one")
    return (
        task.tenant, task.name, task.priority, demand_text(task.demand),
        task.submitted_at, task.max_retries, task.timeout_seconds, task.grace_seconds, task.shareable,
        json_text(after_fields(task.after)), task.queue_ttl_seconds, task.deadline_at, task.expected_seconds,
        task.stream, task.subject, task.array,
        None if task.external is None else json_text(external_fields(task.external)),
        None if task.model is None else json_text(model_fields(task.model)), home_text(task), task.held,
        task.awaits, task.expires_at, task.not_before,
    )  # fmt: skip


def home_text(task: Task) -> str | None:
    return None if task.model is None else "/".join(task.model.home)


def spec_head(submission: Submission) -> Row:
    spec = submission.spec
    return (submission.task.id, spec.arguments, spec.arguments_digest)


def spec_tail(submission: Submission) -> Row:
    spec = submission.spec
    return (
        submission.task.tenant, spec.kind, spec.entrypoint, json_text(spec.command), json_text(spec.objects),
        spec.python, json_text(spec.env), spec.result_format, json_text(spec.labels), spec.model_type,
        spec.working_directory, None if spec.sizing is None else json_text(spec.sizing),
    )  # fmt: skip


class _First(NamedTuple):
    """The first event of one of several tasks that are alike."""

    fields: Fields
    before: str
    """The JSON of the fields up to the id, and after it; without `queued_bytes`."""
    behind: str


class BatchRows:
    """What a batch writes. What alike tasks have in common is made once for all of them."""

    def __init__(self, batch: BatchSubmission) -> None:
        self._batch = batch
        self._firsts: dict[int, _First] = {}
        """By the identity of the submission that they are like."""
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
            common = self._firsts[id(submission.like or submission)].fields
            fields = {**common, "id": task.id, "queued_bytes": task.queued_bytes}
            yield Event(Position(position), at, SUBMITTED, task.id, 1, tenant, fields, task)

    def _blocks(self) -> Iterator[tuple[SetStatement, Alike]]:
        batch = self._batch
        key, marks = batch.idempotency_key, (batch.idempotency_key, batch.body_hash)
        for alike in _by_likeness(batch.submissions):
            first = alike[0]
            ids: list[Row] = [(submission.task.id,) for submission in alike]
            heads = [task_head(submission.task) for submission in alike]
            task = task_tail(first.task)
            if key is not None and first is batch.submissions[0]:
                yield sql.INSERT_TASKS, Alike(heads[:1], (*task, *marks))
                yield sql.INSERT_TASKS, Alike(heads[1:], (*task, None, None))
            else:
                yield sql.INSERT_TASKS, Alike(heads, (*task, None, None))
            yield sql.INSERT_SPECS, Alike([spec_head(submission) for submission in alike], spec_tail(first))
            for label in first.spec.labels.items():
                yield sql.INSERT_LABELS, Alike(ids, (batch.tenant, *label))
        if batch.answer:
            yield sql.INSERT_BATCHES, Alike([(batch.first, batch.tenant, batch.answer)], ())

    def _event_heads(self) -> Iterator[Row]:
        for submission in self._batch.submissions:
            like = submission.like or submission
            first = self._firsts.get(id(like))
            if first is None:
                first = self._firsts[id(like)] = _first(like.task)
            task, size = submission.task.id, submission.task.queued_bytes
            yield task, task, f'{first.before}{task}","queued_bytes":{size}{first.behind}'


def _by_likeness(submissions: Sequence[Submission]) -> list[list[Submission]]:
    """Groups of tasks that differ in ids and arguments alone."""
    found: dict[Row, list[Submission]] = defaultdict(list)
    for submission in submissions:
        spec = submission.spec
        run = (spec.kind, spec.entrypoint, spec.command, spec.objects, spec.python, spec.working_directory)
        found[id(submission.like or submission), *run].append(submission)
    return list(found.values())


def _first(task: Task) -> _First:
    fields = task_fields(changed(task, queued_bytes=0))
    before, mark, behind = json_text(fields).partition(f'"id":"{task.id}"')
    return _First(fields, before + mark[: -len(task.id) - 1], behind)


def row_of_request(request: Request) -> Written:
    return sql.INSERT_REQUESTS, (
        request.id, request.task, request.tenant, request.what, json_text(request.fields), request.made_at,
    )  # fmt: skip


def rows_of_decision(decision: Decision) -> Iterator[Written]:
    """Without leased memory, counts of finished tasks and estimates, which a group adds up.

    An outcome or a checkpoint comes with a change of its task, which gives the tenant.
    """
    for node in decision.nodes:
        yield sql.WRITE_NODES, _node_row(node)
    for device in decision.devices:
        yield sql.WRITE_DEVICES, tuple(getattr(device, name) for name in sql.DEVICE_IN)
    for write in decision.tasks:
        yield sql.MOVE_TASKS, _moved_task_row(write.task)
    for lease in decision.leases:
        yield (sql.INSERT_LEASES, _lease_row(lease)) if lease.version == 1 else _moved_lease(lease)
    for written in decision.pledges:
        pledge = written.pledge
        if written.end is not None:
            yield sql.END_PLEDGES, (pledge.preemptor, pledge.device)
        else:
            yield sql.MAKE_PLEDGES, (
                pledge.preemptor, pledge.device, pledge.mb, pledge.priority, pledge.tenant, pledge.made_at,
                pledge.deadline_at, json_text(pledge.ranks),
            )  # fmt: skip
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
    """`row` has the columns of `reads.ESTIMATE`."""
    tenant, subject, kind, what, counts = row
    pairs = tuple((bucket, count) for bucket, count in from_json(counts))
    return SketchKey(tenant, subject, kind, What(what)), Sketch(pairs)


_page_values = attrgetter(*(column.name for column in tables.item_page.c))
_hot_values = attrgetter(*HOT_FIELDS)
_STATE, _STOP_REASON, _MEMBERS, _MODEL = map(HOT_FIELDS.index, ("state", "stop_reason", "members", "model"))


def _moved_task_row(task: Task) -> Row:
    hot = list(_hot_values(task))
    hot[_STATE] = str(task.state)
    hot[_STOP_REASON] = task.stop_reason and str(task.stop_reason)
    hot[_MEMBERS] = json_text(members_fields(task.members)) if task.members else None
    hot[_MODEL] = json_text(model_fields(task.model)) if task.model is not None else None
    ended_as = hot[_STATE] if task.is_terminal else None
    return (task.id, task.version, *hot, home_text(task), task.is_terminal, ended_as)


def _lease_row(lease: Lease) -> Row:
    return (
        lease.holder_kind.value, lease.holder, lease.fence, lease.rank, lease.device, lease.mb, lease.tenant,
        lease.priority, lease.since, lease.state.value, lease.version, lease.context_mb,
        lease.state is LeaseState.RELEASED, lease.overused_mb, lease.quarantined_at,
    )  # fmt: skip


def _moved_lease(lease: Lease) -> Written:
    return sql.MOVE_LEASES, (
        lease.holder_kind.value, lease.holder, lease.fence, lease.rank, lease.device, lease.version,
        lease.state.value, lease.state is LeaseState.RELEASED, lease.overused_mb, lease.quarantined_at,
    )  # fmt: skip


def _node_row(node: Node) -> Row:
    return (
        node.name, node.cpu, node.memory_mb, node.max_runs, node.incarnation, node.boot_id, node.ready,
        node.cordoned, json_text(node.labels), json_text(node.custom), node.version,
        node.cordon_reason, node.draining_since, node.drain_deadline_at,
    )  # fmt: skip


def _outcome_row(outcome: Outcome, tenant: str) -> Row:
    failure = None if outcome.failure is None else json_text(outcome.failure)
    return (
        outcome.task, outcome.fence, tenant, outcome.ending, outcome.at, outcome.result,
        outcome.result_digest, outcome.result_format, failure, outcome.log_tail,
    )  # fmt: skip


def _checkpoint_row(saved: Checkpointed, tenant: str) -> Row:
    size_bytes = len(saved.data) if saved.data is not None else 0
    return (saved.task, saved.fence, saved.sequence, tenant, saved.at, saved.digest, size_bytes, saved.uri)


def token_row(token: TokenRow) -> Row:
    return (
        token.name, token.sha256, token.tenant, json_text(token.scopes), token.max_priority, token.created_at,
        token.expires_at,
    )  # fmt: skip


def event_of_row(row: Sequence[Any]) -> Event:
    """`row` has the columns of `statements.EVENT`. Raises LogOutgrown for a newer form."""
    position, at, kind, key, version, tenant, fields, reader = row
    check_reader(reader)
    return Event(position, at, kind, key, version, tenant, from_json(fields))


def task_of_row(row: Iterable[Any]) -> Task:
    """`row` has the columns of `reads.TASK`: the fields of a task, in order."""
    values = list(row)
    for at in _REPEATED:
        values[at] = intern(values[at])
    values[_DEMAND] = demand_of_text(values[_DEMAND])
    values[_AFTER] = () if values[_AFTER] == "[]" else after_from(from_json(values[_AFTER]))
    if values[_EXTERNAL] is not None:
        values[_EXTERNAL] = external_from(from_json(values[_EXTERNAL]))
    if values[_TASK_MODEL] is not None:
        values[_TASK_MODEL] = model_from(from_json(values[_TASK_MODEL]))
    values[_TASK_STATE] = TaskState(values[_TASK_STATE])
    if values[_TASK_STOP_REASON] is not None:
        values[_TASK_STOP_REASON] = StopReason(values[_TASK_STOP_REASON])
    members = values[_TASK_MEMBERS]
    values[_TASK_MEMBERS] = () if members is None else members_from(from_json(members))
    return Task(*values)


_places = {field.name: place for place, field in enumerate(fields(Task))}
_REPEATED = tuple(_places[name] for name in ("tenant", "name", "stream", "subject"))
"""Many tasks share these texts; a queue keeps each once, which `bench restart` shows."""
_DEMAND, _AFTER, _EXTERNAL = (_places[name] for name in ("demand", "after", "external"))
_TASK_STATE, _TASK_STOP_REASON = _places["state"], _places["stop_reason"]
_TASK_MEMBERS, _TASK_MODEL = _places["members"], _places["model"]


def spec_of_row(row: Mapping[str, Any]) -> RunSpec:
    return RunSpec(
        kind=row["kind"],
        entrypoint=row["entrypoint"],
        command=tuple(from_json(row["command"])),
        objects=tuple(from_json(row["objects"])),
        arguments=bytes(row["arguments"]),
        arguments_digest=row["arguments_digest"],
        python=row["python"],
        env=from_json(row["env"]),
        result_format=row["result_format"],
        labels=from_json(row["labels"]),
        model_type=row["model_type"],
        working_directory=row["working_directory"],
        sizing=None if row["sizing"] is None else from_json(row["sizing"]),
    )


def lease_of_row(row: Mapping[str, Any]) -> Lease:
    fields = dict(row)
    fields["holder_kind"] = HolderKind(fields["holder_kind"])
    fields["state"] = LeaseState(fields["state"])
    return Lease(**fields)


def pledge_of_row(row: Mapping[str, Any]) -> Pledge:
    return Pledge(**{**row, "ranks": tuple(from_json(row["ranks"]))})


def node_of_row(row: Mapping[str, Any]) -> Node:
    pairs = {
        column: tuple((name, value) for name, value in from_json(row[column]))
        for column in ("labels", "custom")
    }
    return Node(**{**row, **pairs})


def request_of_row(row: Mapping[str, Any]) -> Request:
    return Request(**{**row, "fields": from_json(row["fields"])})


def worker_sets_of(texts: Iterable[str]) -> list[WorkerSet]:
    return [worker_set_from(from_json(fields)) for fields in texts]


def token_of_row(row: Mapping[str, Any]) -> TokenRow:
    return TokenRow(**{**row, "scopes": tuple(from_json(row["scopes"]))})
