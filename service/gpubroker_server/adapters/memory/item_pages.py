"""Results of the items of arrays, in memory."""

from collections.abc import Iterable, Sequence, Set

from gpubroker_server.core.domain.decisions import ItemPage
from gpubroker_server.core.domain.orders import ItemRange
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.ports.arrays import ItemCounts, PageFilter


class PagesInMemory:
    def __init__(self) -> None:
        self._pages: dict[tuple[TaskId, int], ItemPage] = {}

    def has_pages(self, given: Iterable[ItemPage]) -> bool:
        """Whether one of them is stored already."""
        return any((page.array, page.first) in self._pages for page in given)

    def keep_pages(self, given: Iterable[ItemPage]) -> None:
        self._pages |= {(page.array, page.first): page for page in given}

    def drop_pages(self, arrays: Set[TaskId]) -> None:
        self._pages = {key: page for key, page in self._pages.items() if page.array not in arrays}

    def digests_of_pages(self) -> Set[str | None]:
        return {page.digest for page in self._pages.values()}

    async def item_counts(self, array: TaskId) -> ItemCounts:
        pages = self._of(array)
        if not pages:
            return ItemCounts()
        done, failed = sum(page.count for page in pages), sum(page.failed for page in pages)
        times = [page.at for page in pages]
        size_bytes = sum(page.size_bytes for page in pages)
        return ItemCounts(done, failed, max(page.page for page in pages), min(times), max(times), size_bytes)

    async def items_done(self, array: TaskId) -> Sequence[ItemRange]:
        return [(page.first, page.first + page.count) for page in self._of(array)]

    async def item_pages(self, wanted: PageFilter) -> Sequence[ItemPage]:
        chosen = [page for page in self._of(wanted.array) if _matches(page, wanted)]
        chosen.sort(key=lambda page: page.page if wanted.by_commit else page.first)
        return chosen[: wanted.limit]

    def _of(self, array: TaskId) -> list[ItemPage]:
        return [page for page in self._pages.values() if page.array == array]


def _matches(page: ItemPage, wanted: PageFilter) -> bool:
    is_later = page.page > wanted.after if wanted.by_commit else page.first + page.count > wanted.after + 1
    has_it = page.failed > 0 if wanted.failed else page.failed < page.count
    return is_later and (wanted.failed is None or has_it)
