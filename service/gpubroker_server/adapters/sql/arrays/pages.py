"""Reads of pages of results; decisions write them."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Select, func, select

from gpubroker_server.adapters.sql.session import SqlPart
from gpubroker_server.adapters.sql.tables import item_page
from gpubroker_server.core.domain.decisions import ItemPage
from gpubroker_server.core.domain.orders import ItemRange
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.ports.arrays import ItemCounts, PageFilter

_c = item_page.c
_behind = _c.first + _c.count
_COUNTS = (func.coalesce(func.sum(_c.count), 0), func.coalesce(func.sum(_c.failed), 0))
_LAST = (func.coalesce(func.max(_c.page), 0), func.min(_c.at), func.max(_c.at))
_BYTES = func.coalesce(func.sum(_c.size_bytes), 0)


class SqlItemPages(SqlPart):
    """The ItemPages of the store."""

    async def item_counts(self, array: TaskId) -> ItemCounts:
        return await self._readers.run(_counts, array)

    async def items_done(self, array: TaskId) -> Sequence[ItemRange]:
        return await self._readers.run(_done, array)

    async def item_pages(self, wanted: PageFilter) -> Sequence[ItemPage]:
        return await self._readers.run(_pages, wanted)


def counts_of(array: TaskId) -> Select[Any]:
    """What all its pages come to. An index has all of it, so that no page is read."""
    return select(*_COUNTS, *_LAST, _BYTES).where(_c.array == array)


def _counts(connection: Connection, array: TaskId) -> ItemCounts:
    done, failed, *last, size_bytes = connection.execute(counts_of(array)).one()
    return ItemCounts(int(done), int(failed), last[0], last[1], last[2], int(size_bytes))


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
