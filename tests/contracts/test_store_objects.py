"""What tenants have uploaded: each sees its own, for a time, and no more of it than it may have."""

import asyncio
import time

import pytest
from gpubroker_server.core.domain.decisions import Decision, write_move
from gpubroker_server.core.domain.stored_objects import LEAST_BYTES, Counted, Quota, StoredObject
from gpubroker_server.core.domain.task import Move
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.ports.objects import ObjectOrder, ObjectSort, SortKey
from gpubroker_server.ports.store import TaskStore
from msgspec.structs import replace

from tests.builders import a_task
from tests.contracts.scenes import a_submission, next_term
from tests.contracts.test_store_retention import NEVER, cutoffs, pruned

NOW = Instant(time.time())
PLENTY = Quota(10**12, 10**6)


def quota(most_bytes: int) -> Quota:
    return PLENTY._replace(most_bytes=most_bytes)


def an_object(
    name: str = "pixels", size_bytes: int = 10_000, tenant: str = "acme", lasts: float = 3600.0
) -> StoredObject:
    return StoredObject(tenant, f"digest-of-{name}", size_bytes, NOW, Instant(NOW + lasts))


async def test_an_object_is_its_tenant_s_alone(store: TaskStore) -> None:
    mine = an_object()
    assert await store.keep_object(mine, PLENTY) == mine
    assert await store.stored_object("acme", mine.digest) == mine
    assert await store.stored_object("zeta", mine.digest) is None
    assert not await store.drop_object("zeta", mine.digest)
    assert await store.drop_object("acme", mine.digest)
    assert not await store.drop_object("acme", mine.digest)
    assert await store.stored_object("acme", mine.digest) is None


async def test_open_tasks_say_which_objects_they_name(store: TaskStore) -> None:
    named = {"one": ("a", "b"), "two": ("b",), "three": (), "over": ("c",)}
    for id, objects in named.items():
        await store.submit(a_submission(a_task(id), objects=objects))
    term = await next_term(store)
    over = write_move(a_task("over"), Move.CANCELLED, finished_at=NOW)
    await store.commit(term, [Decision("over", "cancelled", tasks=(over,))])
    assert set(await store.objects_of_open_tasks()) == {("default", "a"), ("default", "b")}


async def test_the_same_again_is_the_same_object_and_the_later_end_counts(store: TaskStore) -> None:
    first = an_object(lasts=100)
    await store.keep_object(first, PLENTY)
    again = replace(first, created_at=Instant(NOW + 50), expires_at=Instant(NOW + 150))
    longer = replace(first, expires_at=Instant(NOW + 150))
    assert await store.keep_object(again, PLENTY) == longer
    assert await store.keep_object(first, PLENTY) == longer
    await store.extend_object("acme", first.digest, Instant(NOW + 120))
    assert await store.stored_object("acme", first.digest) == longer
    await store.extend_object("acme", first.digest, Instant(NOW + 200))
    found = await store.stored_object("acme", first.digest)
    assert found is not None
    assert found.expires_at == NOW + 200
    await store.extend_object("acme", "gone", Instant(NOW + 200))
    assert await store.stored_object("acme", "gone") is None


async def test_a_tenant_has_no_more_than_it_may(store: TaskStore) -> None:
    await store.keep_object(an_object("other", tenant="zeta"), quota(10_000))
    await store.keep_object(an_object("a", 6000), quota(10_000))
    assert await store.keep_object(an_object("b", 4001), quota(10_000)) is None
    assert await store.keep_object(an_object("tiny", 1), quota(10_000 - 1)) is None, (
        "it counts as a block of a disk"
    )
    assert await store.stored_object("acme", "digest-of-b") is None
    assert await store.keep_object(an_object("a", 6000), quota(10_000)), "it is there already"
    assert await store.counted_objects("acme", NOW) == Counted(6000, 1)
    assert await store.keep_object(an_object("tiny", 1), quota(6000 + LEAST_BYTES))
    assert await store.counted_objects("acme", NOW) == Counted(6000 + LEAST_BYTES, 2)
    assert await store.counted_objects("nobody", NOW) == Counted(0, 0)


async def test_a_tenant_has_no_more_objects_than_it_may_however_small(store: TaskStore) -> None:
    two = PLENTY._replace(most_objects=2)
    for name in ("a", "b"):
        assert await store.keep_object(an_object(name), two)
    assert await store.keep_object(an_object("c"), two) is None
    assert await store.keep_object(an_object("a"), two), "it is there already"
    assert await store.keep_object(an_object("c", tenant="zeta"), two)
    await store.drop_object("acme", "digest-of-b")
    assert await store.keep_object(an_object("c"), two)


async def test_of_many_at_once_no_more_are_kept_than_fit(store: TaskStore) -> None:
    kept = await asyncio.gather(*(store.keep_object(an_object(f"{n}"), quota(30_000)) for n in range(8)))
    assert sum(one is not None for one in kept) == 3
    assert await store.counted_objects("acme", NOW) == Counted(30_000, 3)


async def test_a_tenants_objects_are_listed_in_pages_without_expired_ones(
    store: TaskStore,
) -> None:
    mine = [an_object(f"{n}") for n in range(5)]
    for one in (*reversed(mine), an_object("2-over", lasts=10), an_object("3", tenant="zeta")):
        await store.keep_object(one, PLENTY)
    later = Instant(NOW + 10)
    by_id: SortKey = ()
    pages = []
    while page := await store.stored_objects("acme", later, ObjectOrder(), after=by_id, limit=2):
        pages.append(page)
        by_id = (page[-1].digest,)
    assert pages == [mine[:2], mine[2:4], mine[4:]]
    assert len(await store.stored_objects("acme", NOW, ObjectOrder(), limit=10)) == 6
    assert await store.stored_objects("nobody", NOW, ObjectOrder(), limit=10) == []


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("sort", ObjectSort)
async def test_objects_are_listed_in_any_order_page_by_page(
    store: TaskStore, sort: ObjectSort, descending: bool
) -> None:
    mine = [
        replace(an_object(f"{n}"), size_bytes=5000 + n % 2, created_at=Instant(NOW - n % 3 / 3))
        for n in range(5)
    ]
    for one in mine:
        await store.keep_object(one, PLENTY)
    found: list[StoredObject] = []
    key: SortKey = ()
    order = ObjectOrder(sort, descending)
    while page := await store.stored_objects("acme", NOW, order, after=key, limit=2):
        found += page
        key = sort.key(page[-1])
        await store.drop_object("acme", page[-1].digest)
    assert found == sorted(mine, key=sort.key, reverse=descending)


async def test_what_is_over_counts_no_more_and_makes_room(store: TaskStore) -> None:
    await store.keep_object(an_object("old", lasts=10), quota(10_000))
    later = Instant(NOW + 10)
    assert await store.counted_objects("acme", later) == Counted(0, 0)
    fresh = replace(an_object("fresh"), created_at=later)
    assert await store.keep_object(fresh, quota(10_000)) == fresh
    assert await store.stored_object("acme", "digest-of-old") is None


async def test_expired_objects_are_pruned_and_their_bytes_unreferenced(store: TaskStore) -> None:
    term = await next_term(store, "me")
    old = [an_object(f"old-{n}", lasts=-1.0) for n in range(3)]
    kept, shared = an_object("kept"), an_object("old-0", tenant="zeta")
    for one in (kept, shared, *old):
        await store.keep_object(replace(one, created_at=NEVER), PLENTY)
    digests = [old[1].digest, kept.digest, shared.digest, "nobody-s"]
    assert await store.referenced(digests) == {*digests} - {"nobody-s"}
    assert await pruned(store, term, cutoffs(finished=NEVER, keyed=NEVER)) == 0, "none has expired by then"
    assert await pruned(store, term, cutoffs(finished=NEVER, keyed=NEVER, expired=NOW)) >= 1
    assert await store.referenced(digests) == {kept.digest, shared.digest}
    assert await store.stored_object("acme", old[0].digest) is None
    assert await store.stored_object("acme", kept.digest) is not None
