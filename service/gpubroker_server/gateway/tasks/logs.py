"""The route that reads what runs print, from the store, while a run prints and afterwards."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import Query, Response
from pydantic import Field
from starlette.responses import StreamingResponse

from gpubroker_server.core.domain.holders import is_started_by_agent
from gpubroker_server.core.domain.orders import LogName
from gpubroker_server.core.domain.ranks import MOST_RANKS
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Fence, Instant
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.status.wholes import WorkerQuery, worker_asked_for
from gpubroker_server.http.faults import invalid
from gpubroker_server.http.identity import Scope
from gpubroker_server.http.problems import Fault
from gpubroker_server.http.routing import Call, Resource
from gpubroker_server.ports.store import BlobCorrupt, BlobMissing, TaskRecord

resource = Resource("tasks")

ANSWER_SECONDS = 3.0
"""How long a reader that does not follow waits for the agent to send the newest part of a log. After that it
gets what is stored."""
PARTS_AT_ONCE = 8


class LogQuery(WorkerQuery):
    attempt: Annotated[
        int | None,
        Field(ge=1, le=2**31 - 1, description="The attempt whose log is read. Default: the newest."),
    ] = None
    stream: Literal["stdout", "stderr", "setup"] = "stdout"
    rank: Annotated[int, Field(ge=0, le=2**31 - 1, description="The rank of a gang whose log is read.")] = 0
    offset: Annotated[
        int, Field(ge=0, le=2**62, description="Begin at this byte of the stream: read on where you stopped.")
    ] = 0
    mark: Annotated[
        str,
        Field(
            pattern="^[0-9a-f]{0,64}$",
            description="Ends the lines that the service adds, to tell them from what was printed.",
        ),
    ] = ""
    follow: Annotated[
        bool, Field(description="Go on until the attempt is over; wait for it if it has yet to begin.")
    ] = False


_UNBUFFERED = {"X-Accel-Buffering": "no"}
"""Headers that make nginx pass the answer on as it arrives instead of buffering it."""
_TEXT: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}


@resource.route(
    "GET /tasks/{task_id}/logs",
    "tasks_logs",
    Scope.TASKS_READ,
    None,
    "not-found tenant-waits validation-failed",
    responses={200: {"description": "What the run printed.", "content": _TEXT}},
    response_class=Response,
)
async def read_log(
    call: Call, parts: Parts, task_id: str, query: Annotated[LogQuery, Query()]
) -> StreamingResponse:
    """Read what a run printed, while it runs and afterwards: the bytes of one stream, in chunks.

    If a log is longer than `limits.log_bytes`, half of this size is kept of its beginning and half of its
    end, and a line in between says how many bytes are missing. An array or a worker set has a log for each
    worker; if it has several workers, name one with `worker`.
    """
    records = parts.records
    record = await records.find(call.identity, task_id)
    record = await worker_asked_for(records, record, query.worker)
    task, waiters = record.task, records.waiters
    newest = max(1, task.fence)
    _check_exists(task, query, newest + (query.follow and not task.is_terminal))
    if not waiters.has_room_for(task.tenant):
        with waiters.expect_for(task.tenant, task.id):
            pass  # `expect_for` raises the Problem.
    fence = Fence(query.attempt or newest)
    log = LogName(task.id, fence, query.rank, query.stream)
    reading = LogReading(parts, record, log, query)
    return StreamingResponse(reading.text(), 200, _UNBUFFERED, "text/plain; charset=utf-8")


def _check_exists(task: Task, query: LogQuery, last_attempt: int) -> None:
    """Check that the task has such an attempt and rank. Raises Problem validation-failed."""
    demand = task.demand
    ranks = len(demand.bundles) if demand.min_ranks is None else MOST_RANKS
    if query.attempt is not None and query.attempt > last_attempt:
        detail = f"the task has had {task.fence} attempts; left out, the newest is read"
        raise invalid(Fault(pointer="query:attempt", detail=detail, code="too-large"))
    if query.rank >= max(1, ranks):
        detail = (
            f"the task has at most {ranks} ranks, from 0" if ranks else "the task is no gang; leave it out"
        )
        raise invalid(Fault(pointer="query:rank", detail=detail, code="too-large"))


class LogReading:
    """The reading of one log for one answer. It holds at most one page of the log in memory, and reads the
    next page when the client has taken the last."""

    def __init__(self, parts: Parts, record: TaskRecord, log: LogName, query: LogQuery) -> None:
        self._records = parts.records
        self._readers = parts.log_readers
        self._record = record
        self._log = log
        self._at_byte = query.offset
        self._follows = query.follow
        self._mark = query.mark

    async def text(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the log, with a line in the place of each part that was not kept."""
        records, clock = self._records, self._records.follower.clock
        since, until = clock.now(), asyncio.get_running_loop().time() + ANSWER_SECONDS
        with records.waiters.expect_for(self._record.task.tenant, self._log.task):
            while True:
                # This is checked before the parts are read, because the last part of a log is stored before
                # the end of its run.
                is_last = records.waiters.is_closed or await self._is_over()
                is_last = is_last or not (self._follows or await self._waits(since, until))
                is_empty = True
                async for data in self._kept():
                    is_empty = False
                    yield data
                if is_empty and is_last:
                    break
                if is_empty:
                    await self._readers.look(self._log, since)
                    await asyncio.sleep(self._readers.seconds_between_looks())
        if self._at_byte == 0 and (tail := await self._tail()):
            yield tail

    async def _is_over(self) -> bool:
        """Return True if nothing more will be added to the log."""
        world, task = self._records.follower.world, self._record.task
        row = world.tasks.get(task.id)
        if row is None or row.version < task.version:  # The World has removed the task, or lags behind.
            self._record = await self._records.reread(self._record)
            row = self._record.task
        if row.fence < self._log.fence:
            return row.is_terminal or not self._follows
        return row.fence > self._log.fence or not (row.is_active and is_started_by_agent(row.holder))

    async def _waits(self, since: Instant, until: float) -> bool:
        """Return True if the agent has not yet reported the log as it was at `since`, and `until` lies
        ahead."""
        _, read_at = await self._records.store.log_end(self._log)
        is_behind = read_at is None or read_at < since
        return is_behind and asyncio.get_running_loop().time() < until

    async def _kept(self) -> AsyncIterator[bytes]:
        """Yield one page of the stored log, from `_at_byte` on. Objects that are missing or damaged are left
        out."""
        lost_to = 0
        for part in await self._records.store.log_parts(self._log, self._at_byte, PARTS_AT_ONCE):
            data = part.data
            if data is None:
                assert part.digest is not None, "a part has its bytes or an object that has them"
                try:
                    data = await self._records.blobs.get(part.digest)
                except (BlobMissing, BlobCorrupt):
                    if part in await self._records.store.log_parts(self._log, part.first_byte, 1):
                        lost_to = part.end_byte
                        continue
                    yield b""  # Another part has replaced this one, so there is more to read.
                    return
            begin = max(self._at_byte, part.first_byte)
            data = data[begin - part.first_byte :]
            if begin > self._at_byte:
                line = data.find(b"\n") + 1  # The first line is incomplete and is dropped.
                begin, data = begin + line, data[line:]
                yield cut_mark(self._at_byte, begin, self._mark)
            self._at_byte = max(self._at_byte, part.end_byte)
            if data:
                yield data
        if lost_to > self._at_byte:
            yield cut_mark(self._at_byte, lost_to, self._mark)
            self._at_byte = lost_to

    async def _tail(self) -> bytes:
        """Return the last bytes of the log of a run whose agent is of an earlier release, which sends nothing
        else of the log; empty for other runs."""
        log, store = self._log, self._records.store
        record = await self._records.reread(self._record)
        if log.stream != "stdout" or log.rank or record.task.fence != log.fence:
            return b""
        if any([(await store.log_end(log._replace(stream=stream)))[1] for stream in ("stdout", "stderr")]):
            return b""
        result = await store.result(log.task)
        return b"" if result is None else result.log_tail


def cut_mark(begin: int, end: int, mark: str) -> bytes:
    """Return the line that stands for bytes that were not kept. Readers learn from it where the text goes
    on."""
    return b"\n[... bytes %d to %d were not kept ...]%s\n" % (begin, end, mark.encode())
