"""The history of measured values, which answers about nodes and devices show beside the current values."""

import base64
import json
from bisect import bisect
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

from gpubroker.units import seconds
from gpubroker.wire.answered import Time
from gpubroker.wire.devices import History
from pydantic import AfterValidator, Field

from gpubroker_server.core.control.history import OLDEST_SECONDS, POINTS, STEP_SECONDS, step_of
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.http.bodies import Query as QueryModel
from gpubroker_server.http.problems import Problem

N = TypeVar("N", bound=str)

USUAL_POINTS = 30
"""A history with at most this many points per value does not limit the number of items in an answer."""
PAGE_POINTS = 36_000
"""The largest number of points of each value in one answer with a long history. An hour of a hundred devices
takes some megabytes."""


def _check(text: str) -> str:
    if seconds(text) > OLDEST_SECONDS:
        raise ValueError("the service keeps one hour of history; ask for 1h or less")
    return text


class HistoryQuery(QueryModel):
    history: Annotated[
        str,
        AfterValidator(_check),
        Field(description="How much of the past to show, at most `1h`; `0` shows the current values alone."),
    ] = "5m"

    @property
    def points(self) -> int:
        return round(seconds(self.history) / STEP_SECONDS)

    def reader(self, parts: Parts) -> Callable[[str], History]:
        """Return a function that takes the name of a node or the key of a device and returns its history."""
        newest = step_of(parts.clock.now())
        steps = range(newest + 1 - self.points, newest + 1)
        since = Time.at(steps.start * STEP_SECONDS)

        def read(name: str) -> History:
            return History(since, STEP_SECONDS, parts.history.means(name, steps))

        return read


class HistoryPageQuery(HistoryQuery):
    """The query of a list whose items have a history. With a long history, the list comes in pages."""

    limit: Annotated[
        int | None,
        Field(
            ge=1,
            description=f"The most items in one answer. With more than 5 minutes of `history`, an answer has "
            f"at most {PAGE_POINTS} points of each value: with `1h`, that is {PAGE_POINTS // POINTS} items.",
        ),
    ] = None
    cursor: Annotated[
        str | None, Field(max_length=1000, description="The `next_cursor` of the page before.")
    ] = None

    def cut(self, names: Sequence[N], list_of: str) -> tuple[Sequence[N], str | None]:
        """Return the names of the items on this page, and the cursor of the next page.

        `names` has the names of all items, in order. `list_of` identifies the list: two lists with different
        items or a different order have different texts. Raises Problem cursor-invalid.
        """
        start = 0 if self.cursor is None else self._start(self.cursor, names, list_of)
        limit = len(names) if self.limit is None else self.limit
        if self.points > USUAL_POINTS:
            limit = min(limit, PAGE_POINTS // self.points)
        page = names[start : start + limit]
        if start + limit >= len(names):
            return page, None
        text = json.dumps([list_of, page[-1]])
        return page, base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")

    def _start(self, cursor: str, names: Sequence[N], list_of: str) -> int:
        try:
            made_for, last = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        except (ValueError, TypeError):
            made_for, last = "", ""
        if made_for != list_of:
            raise Problem(
                "cursor-invalid",
                "the cursor belongs to another list; send the filters and the order of the page before, or "
                "start without a cursor",
            )
        if last in names:
            return names.index(last) + 1
        if list(names) == sorted(names):
            return bisect(names, last)
        raise Problem("cursor-invalid", f"{last} is not in this list any more; start without a cursor")
