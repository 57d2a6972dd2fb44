"""Results of the items of an array: pages of them, and what has none."""

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.decisions import ItemPage
from gpubroker_server.core.domain.orders import ItemRange
from gpubroker_server.core.domain.submission import ArrayTerms
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.lifecycle.array_items import ranges_of
from gpubroker_server.gateway.http.bodies import Query
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.ports.arrays import PageFilter
from gpubroker_server.ports.store import BlobCorrupt, BlobMissing, BlobStore, TaskStore

PAGES_AT_ONCE = 50
"""Pages of results that are read in one query."""
MOST_LINES = 10_000


class ItemErrorView(TypedDict):
    kind: str
    message: str
    traceback: str


class ItemView(TypedDict, total=False):
    number: Annotated[int, Field(description="The item's place in the list, from 0.")]
    state: Literal["succeeded", "failed"]
    seconds: Annotated[float, Field(description="How long it took, all tries together.")]
    tries: int
    result: Any
    data_base64: Annotated[str, Field(description="A pickled result, instead of `result`.")]
    error: ItemErrorView


class ItemPageView(TypedDict):
    items: list[ItemView]
    next_after: Annotated[int, Field(description="`after` for the next page, now or later.")]
    has_more: bool


class ItemQuery(Query):
    after: Annotated[
        int | None,
        Field(
            ge=-1, description="By number: only items after this one. By completion: `next_after` of a page."
        ),
    ] = None
    limit: Annotated[int, Field(ge=1, le=MOST_LINES, description="A page may have some more.")] = 1000
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
    """Lines of whole pages until there are enough; where the next ones begin; whether more are there now."""
    by_commit = query.order == "completed"
    after = (0 if by_commit else -1) if query.after is None else query.after
    failed = None if query.state is None else query.state == "failed"
    lines: list[bytes] = []
    while len(lines) < query.limit:
        wanted = PageFilter(array, by_commit, after, failed, PAGES_AT_ONCE)
        pages = await store.item_pages(wanted)
        for page in pages:
            text = await _lines_of(blobs, page)
            skipped = 0 if by_commit else max(0, after + 1 - page.first)
            found = text.splitlines(keepends=True)[skipped:]
            lines += found if failed is None else [one for one in found if _has_failed(one) is failed]
            after = page.page if by_commit else page.first + page.count - 1
            if len(lines) >= query.limit:
                break
        if len(pages) < PAGES_AT_ONCE:
            break
    more = await store.item_pages(PageFilter(array, by_commit, after, failed, 1))
    return lines, after, bool(more)


def _has_failed(line: bytes) -> bool:
    """The state is the second member, before anything that user code made."""
    return b'"state":"failed"' in line[:60]


async def _lines_of(blobs: BlobStore, page: ItemPage) -> bytes:
    """Raises Problem result-damaged."""
    if page.digest is None:
        return page.lines
    try:
        return await blobs.get(page.digest)
    except (BlobMissing, BlobCorrupt):
        detail = (
            f"the results of items {page.first} to {page.first + page.count - 1} are stored as object "
            f"{page.digest}, and its bytes are missing or damaged; check the disk that holds the blobs"
        )
        raise Problem("result-damaged", detail) from None


async def items_without_success(store: TaskStore, blobs: BlobStore, terms: ArrayTerms) -> list[ItemRange]:
    """The items that have failed or are not done."""
    left = {number for first, behind in terms.numbers for number in range(first, behind)}
    after = -1
    while pages := await store.item_pages(PageFilter(terms.id, False, after, None, PAGES_AT_ONCE)):
        for page in pages:
            numbers = range(page.first, page.first + page.count)
            lines = (await _lines_of(blobs, page)).splitlines() if page.failed else [b""] * page.count
            left -= {number for number, line in zip(numbers, lines, strict=True) if not _has_failed(line)}
        after = pages[-1].first + pages[-1].count - 1
    return list(ranges_of(sorted(left)))
