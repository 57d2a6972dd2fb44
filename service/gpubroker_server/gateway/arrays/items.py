"""Reads the results of an array's items, and finds the items that have none."""

import asyncio
from base64 import b64encode
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from gpubroker_server.core.domain.decisions import ItemPage
from gpubroker_server.core.domain.orders import ItemRange
from gpubroker_server.core.domain.submission import ArrayTerms
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.gateway.status.records import is_json
from gpubroker_server.http.bodies import Query
from gpubroker_server.http.problems import Problem
from gpubroker_server.ports.arrays import PageFilter
from gpubroker_server.ports.store import BlobCorrupt, BlobMissing, BlobStore, TaskStore

PAGES_AT_ONCE = 50
"""The number of pages of results that are read in one query."""
MAX_LINES = 10_000
MAX_BYTES = 16 * 2**20
"""The size of an answer at which no further page of results is added."""


class ItemQuery(Query):
    after: Annotated[
        int | None,
        Field(
            ge=-1, description="By number: only items after this one. By completion: `next_after` of a page."
        ),
    ] = None
    limit: Annotated[int, Field(ge=1, le=MAX_LINES, description="A page may have some more.")] = 1000
    state: Literal["succeeded", "failed"] | None = None
    order: Annotated[
        Literal["number", "completed"],
        Field(description="`completed`: as they were done, so that nothing new comes before `after`."),
    ] = "number"
    format: Annotated[
        Literal["json", "ndjson"],
        Field(description="`ndjson`: one item on each line; `next_after` and `has_more` are headers."),
    ] = "json"


async def lines_of_items(
    store: TaskStore, blobs: BlobStore, array: TaskId, query: ItemQuery
) -> tuple[list[bytes], int, bool]:
    """Return lines of results, the value of `after` for the next request, and True if more results exist now.
    Lines are added in whole pages until `query.limit` or `MAX_BYTES` is reached."""
    by_commit = query.order == "completed"
    after = (0 if by_commit else -1) if query.after is None else query.after
    failed = None if query.state is None else query.state == "failed"
    lines: list[bytes] = []
    size_bytes = 0
    while len(lines) < query.limit and size_bytes < MAX_BYTES:
        wanted = PageFilter(array, by_commit, after, failed, PAGES_AT_ONCE)
        pages = await store.item_pages(wanted)
        for page in pages:
            skipped = 0 if by_commit else max(0, after + 1 - page.first)
            of_page = (await _lines_of(blobs, page))[skipped:]
            of_page = [line for line in of_page if failed in (None, _has_failed(line))]
            lines += of_page
            size_bytes += sum(map(len, of_page))
            after = page.page if by_commit else page.first + page.count - 1
            if len(lines) >= query.limit or size_bytes >= MAX_BYTES:
                break
        if len(pages) < PAGES_AT_ONCE:
            break
    more = await store.item_pages(PageFilter(array, by_commit, after, failed, 1))
    return await asyncio.to_thread(lambda: [*map(_readable, lines)]), after, bool(more)


def _has_failed(line: bytes) -> bool:
    # The state is the second member of a line, before anything that users' code made.
    return b'"state":"failed"' in line[:60]


def _readable(line: bytes) -> bytes:
    """Return the line, with its result as base64 if the result is not JSON. This is checked because users'
    code made the result."""
    head, mark, rest = line.partition(b'"result":')
    if not mark or is_json(rest[:-1]):
        return line
    return head + b'"data_base64":"' + b64encode(rest[:-1]) + b'"}'


async def _lines_of(blobs: BlobStore, page: ItemPage) -> list[bytes]:
    """Return the lines of a page of results. Raises Problem result-damaged if its bytes are missing or
    damaged."""
    if page.digest is None:
        return page.lines.split(b"\n")[:-1]
    try:
        return (await blobs.get(page.digest)).split(b"\n")[:-1]
    except (BlobMissing, BlobCorrupt):
        detail = (
            f"the results of items {page.first} to {page.first + page.count - 1} are stored as object "
            f"{page.digest}, and its bytes are missing or damaged; check the disk that holds the blobs"
        )
        raise Problem("result-damaged", detail) from None


async def items_without_success(store: TaskStore, blobs: BlobStore, terms: ArrayTerms) -> list[ItemRange]:
    """Return the ranges of items that have failed or are not done."""
    is_left = bytearray(max(end for _, end in terms.numbers))
    for first, end in terms.numbers:
        is_left[first:end] = b"\1" * (end - first)
    after = -1
    while pages := await store.item_pages(PageFilter(terms.id, False, after, None, PAGES_AT_ONCE)):
        for page in pages:
            failed = bytes(page.count)
            if page.failed:
                failed = bytes(map(_has_failed, await _lines_of(blobs, page)))
            is_left[page.first : page.first + page.count] = failed
        after = pages[-1].first + pages[-1].count - 1
    return await asyncio.to_thread(lambda: list(_ranges_in(is_left)))


def _ranges_in(is_left: bytearray) -> Iterator[ItemRange]:
    """Yield the ranges of items that are marked with 1."""
    end = 0
    while (first := is_left.find(1, end)) >= 0:
        next_zero = is_left.find(0, first)
        end = next_zero if next_zero >= 0 else len(is_left)
        yield first, end
