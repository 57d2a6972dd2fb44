"""Cursors of lists: where a page ended, tied to the filter that it was a page of."""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from gpubroker_server.gateway.http.ids import is_task_id
from gpubroker_server.gateway.http.problems import Problem


def filter_hash(wanted: Mapping[str, Any]) -> str:
    """A few characters that differ for different filters."""
    text = json.dumps(wanted, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def write_cursor(last: str, filtered_by: str) -> str:
    return base64.urlsafe_b64encode(f"{filtered_by}{last}".encode()).decode().rstrip("=")


def read_cursor(cursor: str, filtered_by: str, is_id: Callable[[str], bool] = is_task_id) -> str:
    """The id after which the next page begins. Raises Problem."""
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode("ascii")
    except ValueError:
        text = ""
    made_for, last = text[: len(filtered_by)], text[len(filtered_by) :]
    if not is_id(last):
        raise Problem("cursor-invalid", "this is no cursor of ours; begin again without one")
    if made_for != filtered_by:
        raise Problem(
            "cursor-invalid",
            "the cursor belongs to a list with other filters; send the same ones, or begin without a cursor",
        )
    return last
