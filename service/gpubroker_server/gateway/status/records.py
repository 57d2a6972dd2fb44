"""Reads tasks and their results for the holder of a token, from rows and from the World."""

import asyncio
import base64
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from math import inf
from typing import Any

from fastapi import Response
from gpubroker.wire.answered import Page
from gpubroker.wire.forecasts import Expected
from gpubroker.wire.tasks import Task as ShownTask
from msgspec import Struct
from msgspec.structs import replace

from gpubroker_server.core.domain.holders import Model, is_started_by_agent
from gpubroker_server.core.domain.task import TERMINAL, Task, TaskState
from gpubroker_server.core.domain.units import Seconds, TaskId
from gpubroker_server.core.lifecycle.learning import kind_of_run
from gpubroker_server.core.lifecycle.quarantine import quarantined
from gpubroker_server.core.planning.forecasts.run_estimates import remaining_seconds
from gpubroker_server.core.serving.batching import FORMAT as TENSORS
from gpubroker_server.core.serving.batching import response_in
from gpubroker_server.core.serving.tensors import BadTensor, values_in_steps
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.phases import Phase, course_of_events, course_of_row, seconds_in_phases
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.status.pending import NOT_YET_SEEN, PendingReasons
from gpubroker_server.gateway.status.quarantine import quarantined_view
from gpubroker_server.gateway.status.task_view import Live, expected_view, phases_view, task_view
from gpubroker_server.http.bodies import PageQuery, direction_of, paging_of
from gpubroker_server.http.identity import Identity
from gpubroker_server.http.ids import is_task_id
from gpubroker_server.http.problems import Problem
from gpubroker_server.http.routing import answer
from gpubroker_server.http.times import Follower, Freshness
from gpubroker_server.http.waiters import Waiters
from gpubroker_server.ports.store import (
    BlobCorrupt,
    BlobMissing,
    BlobStore,
    StoredResult,
    TaskFilter,
    TaskRecord,
    TaskSort,
    TaskStore,
)


def _is_no_model(world: World, task: TaskId) -> bool:
    return not isinstance(world.tasks[task].holder, Model)


_STARTED = (TaskState.RUNNING, TaskState.STOPPING, TaskState.ADMITTED)
_WAITING = (TaskState.PENDING,)
_ALL = 1_000_000
JUST_ACCEPTED = Live(
    leases=[],
    uuids={},
    pending=NOT_YET_SEEN,
    phases=phases_view(dict.fromkeys(Phase, Seconds(0.0))),
)


def _turns(queued: Sequence[TaskId]) -> Callable[[TaskRecord], tuple[int, float, TaskId]]:
    """Return the key that sorts records by turn. Tasks outside of the queue and tasks that have ended have
    equal keys, and stay in the order in which they were read."""
    places = {task: place for place, task in enumerate(queued)}

    def turn(record: TaskRecord) -> tuple[int, float, TaskId]:
        task = record.task
        if task.state in _STARTED:
            return 0, task.started_at or inf, task.id
        if task.is_terminal:
            return 2, 0.0, TaskId("")
        return 1, places.get(task.id, inf), TaskId("")

    return turn


class TaskRecords(Struct, frozen=True):
    store: TaskStore
    blobs: BlobStore
    follower: Follower
    freshness: Freshness
    waiters: Waiters
    pending: PendingReasons
    page_items: int

    async def find(self, identity: Identity, task_id: str, noun: str = "task") -> TaskRecord:
        """Return the record of a task. Raises Problem not-found if there is no such task, or if the token may
        not see it, so that ids cannot be probed."""
        record = await self.store.record(TaskId(task_id)) if is_task_id(task_id) else None
        if record is None or not identity.may_see(record.task.tenant):
            raise Problem("not-found", f'there is no {noun} "{task_id[:100]}"; GET /{noun}s lists yours')
        await self._catch_up_with(record.task)
        return record

    async def find_to_change(self, identity: Identity, task_id: str, action: str) -> TaskRecord:
        """Return the record of a task that is to be changed. `action` is written to the audit log if the task
        belongs to another tenant. Raises Problem not-found as `find` does, and Problem forbidden for a task
        that holds the memory of a model or of a model server."""
        record = await self.find(identity, task_id)
        if record.task.tenant != identity.tenant:
            about = {"tenant": record.task.tenant, "action": action, "subject": record.task.id}
            await self.store.audit(by=identity.name, **about)
        model = record.task.holder
        if not isinstance(model, Model):
            return record
        if not model.model:
            raise Problem(
                "forbidden",
                f"task {task_id} holds what server {model.server} itself takes, which no request changes; "
                "it is free when the server is gone",
            )
        raise Problem(
            "forbidden",
            f'task {task_id} holds model "{model.model}", which the routes of models change: '
            f"POST /models/{model.model}/unload, gpubroker unload {model.model} (scope models:manage)",
        )

    async def reread(self, record: TaskRecord) -> TaskRecord:
        """Return the present record of a task, or `record` if the task has been removed."""
        record = await self.store.record(record.task.id) or record
        await self._catch_up_with(record.task)
        return record

    async def at_its_end(self, record: TaskRecord, seconds: float) -> TaskRecord:
        """Wait until the task has ended, for at most `seconds`, and return its record. Raises Problem
        tenant-waits."""
        task = record.task
        if task.is_terminal or seconds <= 0:
            return record
        with self.waiters.expect_for(task.tenant, task.id) as end:
            row = self.follower.world.tasks.get(task.id)
            if row is None or row.is_terminal:
                # The task has just ended, or the World does not have it yet.
                record = await self.reread(record)
            if not record.task.is_terminal:
                await end.within(Seconds(seconds))
                record = await self.reread(record)
        return record

    async def finished(
        self, record: TaskRecord, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> Response:
        """Return the answer about a task that has ended, with its result."""
        view = await self.view(record)
        stored = await self.store.result(record.task.id)
        return answer(view, status, headers, member=await result_member(self.blobs, stored))

    async def page(
        self, identity: Identity, query: PageQuery, view: Callable[[TaskRecord, Live], Any], **filters: Any
    ) -> Response:
        """Return the answer with one page of tasks. `filters` are fields of TaskFilter; without `tenant` the
        tasks of the token's tenant are listed. Raises Problem cursor-invalid for the cursor of another filter
        or order."""
        filters = {"tenant": identity.tenant, **filters}
        wanted = TaskFilter(**filters)
        paging = paging_of(query, self.page_items, filters, len(wanted.sort.fields))
        wanted = replace(wanted, after=paging.after, limit=paging.limit + 1)
        page, cursor = paging.cut(
            await self.store.records(wanted), lambda record: wanted.sort.key(record.task)
        )
        items = tuple(view(record, live) for record, live in await self._with_lives(page))
        return answer(Page(items, cursor, cursor is not None))

    async def in_turn(self, limit: int, view: Callable[[TaskRecord, Live], Any], **filters: Any) -> Response:
        """Return the answer with one page of tasks by turn: first the tasks that run, then the waiting tasks
        in the order of the queue, then the waiting tasks outside of the queue (held, not due, or with
        dependencies), then the tasks that ended last. `filters` are fields of TaskFilter."""
        limit = min(limit, self.page_items)
        states = filters.pop("states") or tuple(TaskState)
        wanted = TaskFilter(**filters, limit=limit + 1)
        is_filtered = any(value not in (None, {}) for name, value in filters.items() if name != "tenant")
        queued = await self._queued(wanted, is_filtered) if TaskState.PENDING in states else ()
        parts = [
            replace(wanted, states=chosen, **more)
            for of_part, more in (
                (_STARTED, {}),
                (_WAITING, {"ids": queued}),
                (_WAITING, {}),
                (TERMINAL, {"sort": TaskSort.FINISHED}),
            )
            if (chosen := tuple(state for state in of_part if state in states))
        ]
        records = sorted(await self.store.first_records(parts, limit + 1), key=_turns(queued))
        items = tuple(view(record, live) for record, live in await self._with_lives(records[:limit]))
        return answer(Page(items, None, len(records) > limit))

    async def _queued(self, wanted: TaskFilter, is_filtered: bool) -> tuple[TaskId, ...]:
        """Return the first tasks of the queue that match, in its order. The World has the queue, so a task
        that was submitted a moment ago may not be among them, and one that has just started may."""
        world, now = self.follower.world, self.follower.clock.now()
        if is_filtered:
            waiting = replace(wanted, states=_WAITING, limit=_ALL)
            is_listed = frozenset(await self.store.selected(waiting)).__contains__
        else:
            is_listed = partial(_is_no_model, world)
        queue = world.queue.of_tenant(wanted.tenant, now, self.pending.policy)
        return tuple(islice(filter(is_listed, queue), wanted.limit))

    async def view(self, record: TaskRecord) -> ShownTask:
        [(record, live)] = await self._with_lives([record], explained=True)
        return task_view(record, live)

    async def _with_lives(
        self, records: Sequence[TaskRecord], *, explained: bool = False
    ) -> list[tuple[TaskRecord, Live]]:
        now = self.follower.clock.now()
        lives = [self.live(record.task, explained=explained) for record in records]
        courses = [course_of_row(record.task) for record in records]
        logged = [record.task.id for record, course in zip(records, courses, strict=True) if course is None]
        moves = defaultdict[str, list[Event]](list)
        for event in await self.store.moves(logged) if logged else ():
            moves[event.key].append(event)
        shown: list[tuple[TaskRecord, Live]] = []
        for record, live, course in zip(records, lives, courses, strict=True):
            by_agent = is_started_by_agent(record.task.holder)
            course = course or course_of_events(moves[record.task.id], by_agent=by_agent)
            phases = None if course is None else phases_view(seconds_in_phases(course, now))
            shown.append((record, replace(live, phases=phases)))
        return shown

    def live(self, task: Task, *, explained: bool = True) -> Live:
        """Return the facts about a task that its row does not have. `explained` says whether they include why
        the task waits, which costs most and is left out of lists."""
        world = self.follower.world
        leases = world.leases.get((task.id, task.fence), {})
        waits = explained and task.state is TaskState.PENDING
        return Live(
            leases=[leases[key] for key in sorted(leases)],
            uuids={lease.device: world.ledgers[lease.device].device.uuid for lease in leases.values()},
            progress=self.follower.progress.get(task.id) if task.is_active else None,
            eta=self._eta(task),
            pending=self.pending.of(task, self.follower.clock.now()) if waits else None,
            quarantine=tuple(quarantined_view(world, run) for run in quarantined(world, task.id)),
            notice=self.pending.notice(task),
        )

    def _eta(self, task: Task) -> Expected | None:
        if task.state is not TaskState.RUNNING:
            return None
        world, now = self.follower.world, self.follower.clock.now()
        kind = kind_of_run(world, task)
        remaining = remaining_seconds(task, world.learned.sketches, now, kind=kind)
        return None if remaining is None else expected_view(remaining, now)

    async def _catch_up_with(self, row: Task) -> None:
        """Wait for the World if it lags behind the row of an active task, because an answer takes the devices
        of the task from the World."""
        seen = self.follower.world.tasks.get(row.id)
        if row.is_active and (seen is None or seen.version < row.version):
            await self.freshness.catch_up()


def order_of(sort: str) -> dict[str, Any]:
    """Return the fields of TaskFilter for a value of `sort`, such as `submitted` or `-priority`."""
    word, descending = direction_of(sort)
    return {"sort": TaskSort[word.upper()], "descending": descending}


NO_RESULT = b'"result":null'

_INLINE_BYTES = 64 * 1024
"""The size in bytes above which a result is prepared on a thread, so that other requests go on."""
_BASE64_STEP = 3 * 2**18
"""The number of bytes that are encoded at once."""


async def result_member(blobs: BlobStore, stored: StoredResult | None) -> bytes:
    """Return the member of an answer that holds the result: `"result":...` for JSON, `"data_base64":"..."`
    for other bytes. Raises Problem result-damaged if the bytes are missing or damaged."""
    data = None if stored is None else await bytes_of(blobs, stored)
    if stored is None or data is None:
        return NO_RESULT
    if len(data) <= _INLINE_BYTES:
        return _member(data, stored.format)
    return await asyncio.to_thread(_member, data, stored.format)


def shown_format(form: str) -> str:
    """Return the name of a result's format in answers. The answer of a model is shown as JSON."""
    return "json" if form == TENSORS else form


def _member(data: bytes, form: str) -> bytes:
    if form in ("json", "object") and is_json(data):
        return b'"result":' + data
    if form == TENSORS and (inference := _inference_json(data)) is not None:
        return b'"result":' + inference
    return b'"data_base64":"' + _base64(data) + b'"'


def _inference_json(data: bytes) -> bytes | None:
    """Return a model's answer as JSON of Triton's protocol; None if the bytes are not a model's answer."""
    try:
        answer = response_in(data)
        outputs = [(tensor, values_in_steps(tensor)) for tensor in answer.outputs]
    except BadTensor:
        return None
    head = {"model_name": answer.model, "model_version": answer.version}
    if answer.id:
        head["id"] = answer.id
    parts = [json.dumps(head).encode()[:-1], b',"parameters":', json.dumps(answer.parameters).encode()]
    for index, (tensor, steps) in enumerate(outputs):
        described = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        parts += [b"," if index else b',"outputs":[', json.dumps(described).encode()[:-1], b',"data":[']
        parts += _listed(steps)
        parts.append(b"]}")
    return b"".join((*parts, b"]}"))


def _listed(steps: Iterable[list[Any]]) -> Iterator[bytes]:
    """Yield the JSON of a list in steps, between which other threads can run."""
    for index, values in enumerate(steps):
        yield b"," if index else b""
        yield json.dumps(values, separators=(",", ":")).encode()[1:-1]


def is_json(data: bytes) -> bool:
    """Return True if the bytes are JSON. This is checked because a process that runs users' code wrote
    them."""
    try:
        _CHECK.decode(data.decode())
    except (ValueError, RecursionError):
        return False
    return True


def _let_others_run(_found: object) -> None:
    """Let other threads run. The parser calls this function for each number and object, because it releases
    no lock unless it calls Python code.

    While 60 MB of numbers or objects are parsed, the event loop then waits for 30 ms instead of 300 to 600
    ms.
    """


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_CHECK = json.JSONDecoder(
    parse_float=_let_others_run,
    parse_int=_let_others_run,
    object_pairs_hook=_let_others_run,
    parse_constant=_refuse,
)


def _base64(data: bytes) -> bytes:
    """Return the base64 of bytes. They are encoded in steps, between which other threads can run."""
    starts = range(0, len(data), _BASE64_STEP)
    return b"".join(base64.b64encode(data[start : start + _BASE64_STEP]) for start in starts)


async def bytes_of(blobs: BlobStore, stored: StoredResult) -> bytes | None:
    """Return the bytes of a result, or None if it has none. Raises Problem result-damaged if the bytes are
    missing or damaged."""
    if stored.digest is None:
        return stored.data
    try:
        return await blobs.get(stored.digest)
    except (BlobMissing, BlobCorrupt):
        raise Problem(
            "result-damaged",
            f"the result was stored as object {stored.digest}, and its bytes are missing or damaged; "
            "run the task again, and check the disk that holds the blobs",
        ) from None
