"""Pages of lists, and cursors: where a page ended, tied to the filter of its list."""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field

from gpubroker_server.gateway.http.bodies import Query
from gpubroker_server.gateway.http.ids import is_task_id
from gpubroker_server.gateway.http.problems import Problem


class PageQuery(Query):
    limit: Annotated[int, Field(ge=1, description="Values above the server's maximum mean the maximum.")] = (
        100
    )
    cursor: Annotated[str | None, Field(max_length=200, description="`next_cursor` of the page before.")] = (
        None
    )


def filter_hash(filters: Mapping[str, Any]) -> str:
    """A few characters that differ for different filters."""
    text = json.dumps(filters, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def write_cursor(last_id: str, filtered_by: str) -> str:
    return base64.urlsafe_b64encode(f"{filtered_by}{last_id}".encode()).decode().rstrip("=")


def read_cursor(cursor: str, filtered_by: str, is_id: Callable[[str], bool] = is_task_id) -> str:
    """The id after which the next page begins. Raises Problem."""
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode("ascii")
    except ValueError:
        text = ""
    made_for, last_id = text[: len(filtered_by)], text[len(filtered_by) :]
    if not is_id(last_id):
        raise Problem("cursor-invalid", "the cursor is not one of this service; start without a cursor")
    if made_for != filtered_by:
        raise Problem(
            "cursor-invalid",
            "the cursor belongs to a list with other filters; send the same ones, or start without a cursor",
        )
    return last_id
