"""What tenants have used is kept with the leases, and is what the log tells."""

import pytest
from gpubroker_server.bootstrap.follower import fill
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import CommitVerdict, TaskStore
from msgspec.structs import replace

from tests.builders import GIB, a_task
from tests.contracts.scenes import (
    a_new_lease,
    admission,
    claimed,
    log_of,
    picture,
    release,
    replayed,
    with_gpu,
)


async def test_world_from_rows_has_exactly_the_usage_of_one_from_the_log(
    store: TaskStore,
) -> None:
    tasks = [a_task(f"t{n}", tenant=f"team{n % 2}") for n in range(4)]
    term = await with_gpu(store, *tasks)
    await store.commit(term, [admission(task) for task in tasks[:3]])
    await store.commit(term, [admission(tasks[3], mb=5 * GIB)])
    await store.commit(
        term, [release(a_new_lease(claimed(tasks[0]))), release(a_new_lease(claimed(tasks[1])))]
    )
    from_rows, from_log = World(), replayed(await log_of(store))
    fill(from_rows, await store.snapshot())
    assert picture(from_rows) == picture(from_log)
    later = Instant(from_log.as_of + 1000.0)
    assert [from_rows.accounts.held_mb(team) for team in ("team0", "team1")] == [10 * GIB, 5 * GIB]
    assert from_rows.accounts.used("team0", later) == from_log.accounts.used("team0", later) > 0


async def test_a_dropped_decision_charges_no_tenant(store: TaskStore) -> None:
    task = a_task("t1")
    term = await with_gpu(store, task)
    stale = admission(replace(task, version=7))
    assert await store.commit(term, [stale]) == [CommitVerdict.STALE]
    assert (await store.snapshot()).usage == []


async def test_what_comes_and_goes_in_one_commit_is_charged_up_to_then(store: TaskStore) -> None:
    one, two = a_task("t1"), a_task("t2")
    term = await with_gpu(store, one, two)
    await store.commit(term, [admission(one)])
    [before] = (await store.snapshot()).usage
    swap: list[Decision] = [release(a_new_lease(claimed(one))), admission(two)]
    await store.commit(term, swap)
    [after] = (await store.snapshot()).usage
    assert after.at > before.at
    assert after.mb_seconds == pytest.approx(10 * GIB * (after.at - before.at), rel=1e-3)
