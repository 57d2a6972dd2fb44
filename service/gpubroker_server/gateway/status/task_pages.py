"""Pages of one tenant's tasks: the same for every route that lists some."""

from collections.abc import Callable
from typing import Any

from fastapi import Response

from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.gateway.http.pages import filter_hash, read_cursor, write_cursor
from gpubroker_server.gateway.http.queries import PageQuery
from gpubroker_server.gateway.http.routing import Call, answer
from gpubroker_server.gateway.status.records import live_of
from gpubroker_server.gateway.status.task_view import Live
from gpubroker_server.ports.store import TaskFilter, TaskRecord


async def page_of(
    call: Call, query: PageQuery, view: Callable[[TaskRecord, Live], Any], **wanted: Any
) -> Response:
    """Newest first; `wanted` are fields of TaskFilter. A cursor is of one filter only: Raises Problem
    cursor-invalid for another's."""
    parts = call.parts
    limit = min(query.limit, parts.limits.page_items)
    wanted["tenant"] = call.identity.tenant
    filtered_by = filter_hash(wanted)
    after = None if query.cursor is None else TaskId(read_cursor(query.cursor, filtered_by))
    records = await parts.store.records(TaskFilter(**wanted, after=after, limit=limit + 1))
    page, has_more = records[:limit], len(records) > limit
    return answer(
        {
            "items": [view(record, live_of(parts, record.task, explained=False)) for record in page],
            "next_cursor": write_cursor(page[-1].task.id, filtered_by) if has_more else None,
            "has_more": has_more,
        }
    )
