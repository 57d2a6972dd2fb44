"""Port to the results of the items of arrays."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct

from gpubroker_server.core.domain.decisions import ItemPage
from gpubroker_server.core.domain.orders import ItemRange
from gpubroker_server.core.domain.units import Instant, TaskId


class ItemCounts(Struct, frozen=True):
    """The counts of the items of an array that are done."""

    done: int = 0
    failed: int = 0
    last_page: int = 0
    first_at: Instant | None = None
    last_at: Instant | None = None
    """The time at which the latest of the done items was stored; `first_at` is that of the first."""
    size_bytes: int = 0
    """The size of the done items' lines in bytes."""

    @property
    def per_second(self) -> float | None:
        """The mean rate in items per second; None until two items were stored at different times."""
        if self.first_at is None or self.last_at is None or self.last_at <= self.first_at:
            return None
        return self.done / (self.last_at - self.first_at)


class PageFilter(NamedTuple):
    """Selects pages of an array, in the order of their items or, if `by_commit`, of their commits."""

    array: TaskId
    by_commit: bool = False
    after: int = -1
    """Selects pages with an item after this one or, if `by_commit`, pages with a higher number."""
    failed: bool | None = None
    """Selects pages with a failed item (True), or with one that succeeded (False)."""
    limit: int = 100


class ItemPages(Protocol):
    """Reads the pages of results. Decisions write them."""

    async def item_counts(self, array: TaskId) -> ItemCounts: ...

    async def items_done(self, array: TaskId) -> Sequence[ItemRange]: ...

    async def item_pages(self, wanted: PageFilter) -> Sequence[ItemPage]: ...
