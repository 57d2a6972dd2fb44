"""Tasks, leases and the rest as rows, and back. JSON columns hold what no statement looks into."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from operator import attrgetter
from sys import intern
from typing import Any

from pydantic_core import from_json

from gpubroker_server.adapters.sql import statements as sql
from gpubroker_server.adapters.sql.compatibility import check_reader
from gpubroker_server.adapters.sql.rowset import Row, SetStatement, json_text
from gpubroker_server.core.domain.decisions import Decision, Outcome, Request
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.device import Node
from gpubroker_server.core.domain.estimates import Lesson, Sketch, Topic, What
from gpubroker_server.core.domain.lease import HolderKind, Lease, LeaseState, Pledge
from gpubroker_server.core.domain.orders import Checkpointed
from gpubroker_server.core.domain.task import HOT_FIELDS, StopReason, Task, TaskState
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
)
from gpubroker_server.core.world.events import Event, NewEvent, task_of
from gpubroker_server.ports.store import RunSpec, Submission, TokenRow

Written = tuple[SetStatement, Row]


def mapping_text(mapping: Mapping[str, str]) -> str:
    """Most tasks have no labels and no environment."""
    return json_text(mapping) if mapping else "{}"


@lru_cache(4096)
def demand_text(demand: Demand) -> str:
    """Tasks come in many, demands in few kinds."""
    return json_text(demand_fields(demand))


@lru_cache(4096)
def demand_of(text: str) -> Demand:
    return demand_from(from_json(text))


def event_row(event: NewEvent) -> Row:
    """An event without its position and time, which stand first in `statements.EVENT_IN`."""
    fields = json_text(event.fields)
    return (event.key, task_of(event), fields, event.kind, event.version, event.tenant, event.reader)


def rows_of_submission(submission: Submission) -> Iterator[Written]:
    key = submission.idempotency_key
    marks = (key, submission.body_hash) if key is not None else _NO_KEY
    yield sql.INSERT_TASKS, (*new_task_row(submission.task), *marks)
    yield from _beside_task(submission)


_NO_KEY = (None, None)


def new_task_row(task: Task) -> Row:
    """Without the key and the body's hash, which stand last."""
    if task.state is not TaskState.PENDING or task.version != 1:
        raise ValueError(f"task {task.id} is {task.state} in version {task.version}; submit a new one")
    return (
        task.id, task.tenant, task.name, task.priority, demand_text(task.demand), task.submitted_at,
        task.max_retries, task.timeout_seconds, task.grace_seconds, task.shareable, _after_text(task),
        task.queue_ttl_seconds, task.deadline_at, task.expected_seconds, task.stream, task.subject,
        None if task.external is None else json_text(external_fields(task.external)),
        None if task.model is None else json_text(model_fields(task.model)), home_text(task), task.held,
        task.awaits, task.expires_at, task.not_before,
    )  # fmt: skip


def home_text(task: Task) -> str | None:
    return None if task.model is None else "/".join(task.model.home)


def _beside_task(submission: Submission) -> Iterator[Written]:
    task = submission.task
    yield sql.INSERT_SPECS, (*spec_head(submission), *spec_tail(submission))
    for name, value in submission.spec.labels.items():
        yield sql.INSERT_LABELS, (task.id, task.tenant, name, value)


def spec_head(submission: Submission) -> Row:
    """Of its spec, what may differ among tasks that run the same with other arguments."""
    spec = submission.spec
    return (submission.task.id, spec.arguments, spec.arguments_digest)


def spec_tail(submission: Submission) -> Row:
    spec = submission.spec
    return (
        submission.task.tenant, spec.kind, spec.entrypoint, json_text(spec.command) if spec.command else "[]",
        spec.python, mapping_text(spec.env), spec.result_format, mapping_text(spec.labels), spec.model_type,
        spec.working_directory, None if spec.sizing is None else json_text(spec.sizing),
    )  # fmt: skip


def row_of_request(request: Request) -> Written:
    return sql.INSERT_REQUESTS, (
        request.id, request.task, request.tenant, request.what, json_text(request.fields), request.made_at,
    )  # fmt: skip


def rows_of_decision(decision: Decision) -> Iterator[Written]:
    """Its rows, except the sums of leased memory and of finished tasks, which a whole group adds up,
    and except what it teaches, of which a group writes the last about each topic.

    What a run left behind comes with a change of its task, whose tenant it takes.
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
        yield sql.TRIM_CHECKPOINTS, (decision.checkpoint.task,)
    for request in decision.requests_done:
        yield sql.DELETE_REQUESTS, (request,)
    for note in decision.audit:
        yield sql.INSERT_AUDIT, (note.at, note.tenant, note.actor, note.action, note.subject, note.reason)
    for topic in decision.forgotten:
        yield sql.FORGET_ESTIMATES, (topic.tenant, topic.subject, topic.kind, topic.what.value)


def estimate_row(lesson: Lesson) -> Row:
    topic, counts = lesson.topic, json_text(lesson.sketch.counts)
    return (topic.tenant, topic.subject, topic.kind, topic.what.value, lesson.at, counts)


def estimate_of_row(row: Sequence[Any]) -> tuple[Topic, Sketch]:
    """`row` has the columns of `reads.ESTIMATE`."""
    tenant, subject, kind, what, counts = row
    pairs = tuple((bucket, count) for bucket, count in from_json(counts))
    return Topic(tenant, subject, kind, What(what)), Sketch(pairs)


def _after_text(task: Task) -> str:
    return json_text(after_fields(task.after)) if task.after else "[]"


_hot_values = attrgetter(*HOT_FIELDS)
_STATE, _STOP_REASON, _MEMBERS, _MODEL = map(HOT_FIELDS.index, ("state", "stop_reason", "members", "model"))


def _moved_task_row(task: Task) -> Row:
    hot = list(_hot_values(task))
    hot[_STATE] = str(task.state)
    hot[_STOP_REASON] = task.stop_reason and str(task.stop_reason)
    hot[_MEMBERS] = json_text(members_fields(task.members)) if task.members else None
    hot[_MODEL] = json_text(model_fields(task.model)) if task.model is not None else None
    ended_as = hot[_STATE] if task.is_terminal else None
    return (task.id, task.version, *hot, task.is_terminal, ended_as)


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
    """`row` has the columns of `statements.EVENT`. Raises Outgrown if it is of a form not known here."""
    position, at, kind, key, version, tenant, fields, reader = row
    check_reader(reader)
    return Event(position, at, kind, key, version, tenant, from_json(fields))


def task_of_row(row: Iterable[Any]) -> Task:
    """`row` has the columns of `reads.TASK`, which are a task's fields in their order."""
    values = list(row)
    for at in _REPEATED:
        values[at] = intern(values[at])
    values[_DEMAND] = demand_of(values[_DEMAND])
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
"""Words that many tasks share: of a long queue they are kept once."""
_DEMAND, _AFTER, _EXTERNAL = (_places[name] for name in ("demand", "after", "external"))
_TASK_STATE, _TASK_STOP_REASON = _places["state"], _places["stop_reason"]
_TASK_MEMBERS, _TASK_MODEL = _places["members"], _places["model"]


def spec_of_row(row: Mapping[str, Any]) -> RunSpec:
    return RunSpec(
        kind=row["kind"],
        entrypoint=row["entrypoint"],
        command=tuple(from_json(row["command"])),
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


def token_of_row(row: Mapping[str, Any]) -> TokenRow:
    return TokenRow(**{**row, "scopes": tuple(from_json(row["scopes"]))})
