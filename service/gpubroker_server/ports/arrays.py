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
    """The times when the first and the latest of them were stored."""
    size_bytes: int = 0
    """The bytes of their lines."""

    @property
    def per_second(self) -> float | None:
        """The mean rate; None until there are two times."""
        if self.first_at is None or self.last_at is None or self.last_at <= self.first_at:
            return None
        return self.done / (self.last_at - self.first_at)


class PageFilter(NamedTuple):
    """Pages of an array, in the order of their items, or of their commits."""

    array: TaskId
    by_commit: bool = False
    after: int = -1
    """Selects pages with a later item, or with a higher number."""
    failed: bool | None = None
    """Selects pages with a failed item (True), or with one that succeeded (False)."""
    limit: int = 100


class ItemPages(Protocol):
    """The pages of results, which decisions write."""

    async def item_counts(self, array: TaskId) -> ItemCounts: ...

    async def items_done(self, array: TaskId) -> Sequence[ItemRange]: ...

    async def item_pages(self, wanted: PageFilter) -> Sequence[ItemPage]: ...
