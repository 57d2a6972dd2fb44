"""Reads of pages of results; decisions write them."""

from collections.abc import Sequence

from sqlalchemy import Connection, func, select

from gpubroker_server.adapters.sql.reads import Readers
from gpubroker_server.adapters.sql.tables import item_page
from gpubroker_server.core.domain.decisions import ItemPage
from gpubroker_server.core.domain.orders import ItemRange
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.ports.arrays import ItemCounts, PageFilter

_c = item_page.c
_behind = _c.first + _c.count
_COUNTS = (func.coalesce(func.sum(_c.count), 0), func.coalesce(func.sum(_c.failed), 0))
_LAST = (func.coalesce(func.max(_c.page), 0), func.min(_c.at), func.max(_c.at))


class SqlItemPages:
    """The ItemPages of the store."""

    _readers: Readers

    async def item_counts(self, array: TaskId) -> ItemCounts:
        return await self._readers.run(_counts, array)

    async def items_done(self, array: TaskId) -> Sequence[ItemRange]:
        return await self._readers.run(_done, array)

    async def item_pages(self, wanted: PageFilter) -> Sequence[ItemPage]:
        return await self._readers.run(_pages, wanted)


def _counts(connection: Connection, array: TaskId) -> ItemCounts:
    row = connection.execute(select(*_COUNTS, *_LAST).where(_c.array == array)).one()
    return ItemCounts(int(row[0]), int(row[1]), *row[2:])


def _done(connection: Connection, array: TaskId) -> Sequence[ItemRange]:
    found = connection.execute(select(_c.first, _behind).where(_c.array == array))
    return [(first, behind) for first, behind in found]


def _pages(connection: Connection, wanted: PageFilter) -> Sequence[ItemPage]:
    order = _c.page if wanted.by_commit else _c.first
    chosen = select(item_page).where(_c.array == wanted.array).order_by(order).limit(wanted.limit)
    # The primary key finds the first one; a page holds few items, so few rows before it are read.
    chosen = chosen.where(_c.page > wanted.after if wanted.by_commit else _behind > wanted.after + 1)
    if wanted.failed is not None:
        chosen = chosen.where(_c.failed > 0 if wanted.failed else _c.failed < _c.count)
    return [ItemPage(**row) for row in connection.execute(chosen).mappings()]
