"""Measured values of the recent past, beside those of now."""

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
PAGE_POINTS = 36_000
"""Of each value; a hundred devices with an hour each are some megabytes."""


def _check(text: str) -> str:
    if seconds(text) > OLDEST_SECONDS:
        raise ValueError("an hour is kept, and no more: ask for 1h or less")
    return text


class HistoryQuery(QueryModel):
    history: Annotated[
        str,
        AfterValidator(_check),
        Field(description="How much of the past to show, such as `1h`, which is the most, or `0`."),
    ] = "5m"

    @property
    def points(self) -> int:
        return round(seconds(self.history) / STEP_SECONDS)

    def reader(self, parts: Parts) -> Callable[[str], History]:
        """Return what reads the history of a node by its name, or of a device by its key."""
        newest = step_of(parts.clock.now())
        steps = range(newest + 1 - self.points, newest + 1)
        since = Time.at(steps.start * STEP_SECONDS)

        def read(name: str) -> History:
            return History(since, STEP_SECONDS, parts.history.means(name, steps))

        return read


class HistoryPageQuery(HistoryQuery):
    """Of a list whose items have a history: with a long one, it comes in pages."""

    limit: Annotated[
        int | None,
        Field(
            ge=1,
            description=f"How many items at most. With more than 5 minutes of `history` an answer has "
            f"{PAGE_POINTS} points of each value at most, such as {PAGE_POINTS // POINTS} items with `1h`.",
        ),
    ] = None
    cursor: Annotated[str | None, Field(max_length=1000, description="`next_cursor` of a page.")] = None

    def cut(self, names: Sequence[N], list_of: str) -> tuple[Sequence[N], str | None]:
        """Return the names of the items on this page, and the cursor of the next one. `names`: of all items,
        in order; `list_of`: differs for lists with other items or another order. Raises Problem
        cursor-invalid."""
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
                "the cursor is not one of this list; send the same filters and order, or start without it",
            )
        if last in names:
            return names.index(last) + 1
        if list(names) == sorted(names):
            return bisect(names, last)
        raise Problem("cursor-invalid", f"{last} is not in this list any more; start without a cursor")
