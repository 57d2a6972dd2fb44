"""The ledger of one device."""

from typing import Any

import pytest
from gpubroker_server.core.domain.lease import HolderKind, LeaseState
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.world.ledger import DeviceLedger
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.builders import NOW, a_device, a_lease, a_pledge, a_sample, a_task

DEVICE = a_device(mb=100, reserve_mb=10)
LOW = a_task("low", priority=10, fence=1)
HIGH = a_task("high", priority=80)


def a_book(**lease: object) -> DeviceLedger:
    """90 MiB that may be leased; `low` holds 60 of them."""
    ledger = DeviceLedger(DEVICE)
    ledger.put(a_lease(LOW, DEVICE.key, 60, **lease))
    return ledger


def test_leased_and_held_memory_are_counted_apart() -> None:
    ledger = a_book()
    ledger.measure(a_sample(DEVICE.key, by_holder={"low:1": 70}))
    assert (ledger.leased_mb(), ledger.held_mb()) == (60, 70)


def test_the_reserve_is_never_free() -> None:
    assert DeviceLedger(DEVICE).free_mb() == 90


def test_a_holder_counts_as_the_larger_of_its_lease_and_its_measured_use() -> None:
    ledger = a_book()
    ledger.measure(a_sample(DEVICE.key, by_holder={"low:1": 70}))
    assert ledger.free_mb() == 20
    ledger.measure(a_sample(DEVICE.key, by_holder={"low:1": 10}))
    assert ledger.free_mb() == 30


def test_use_measured_for_an_older_claim_does_not_count_for_the_new_one() -> None:
    ledger = a_book()
    ledger.measure(a_sample(DEVICE.key, by_holder={"low:0": 80}))
    assert ledger.free_mb() == 30


def test_a_changed_lease_keeps_its_holders_measured_use() -> None:
    ledger = a_book()
    ledger.measure(a_sample(DEVICE.key, by_holder={"low:1": 70}))
    ledger.put(a_lease(LOW, DEVICE.key, 60, state=LeaseState.RELEASING))
    assert ledger.free_mb() == 20


def test_foreign_memory_counts_as_measured_and_at_least_as_declared() -> None:
    ledger = DeviceLedger(a_device(mb=100, declared_foreign_mb=20))
    assert ledger.free_mb() == 80
    ledger.measure(a_sample(DEVICE.key, foreign_mb=30))
    assert ledger.free_mb() == 70


def a_served_book(foreign_mb: int | None, used_mb: int, state: LeaseState = LeaseState.HELD) -> DeviceLedger:
    """100 MiB, of which 40 are leased to a model on a server."""
    ledger = DeviceLedger(a_device(mb=100))
    lease = a_lease(LOW, DEVICE.key, 40, state=state)
    ledger.put(replace(lease, holder_kind=HolderKind.MODEL))
    ledger.measure(a_sample(DEVICE.key, used_mb=used_mb, foreign_mb=foreign_mb))
    return ledger


@pytest.mark.parametrize(
    ("measured_mb", "foreign_mb", "free_mb"), [(0, 0, 60), (30, 0, 60), (40, 0, 60), (55, 15, 45)]
)
def test_a_model_servers_use_counts_as_its_models_up_to_their_leases(
    measured_mb: int, foreign_mb: int, free_mb: int
) -> None:
    ledger = a_served_book(measured_mb, measured_mb)
    assert (ledger.foreign_mb, ledger.unexplained_mb, ledger.free_mb()) == (foreign_mb, 0, free_mb)
    [model] = ledger.holdings
    ledger.assume_released(model)
    assert (ledger.foreign_mb, ledger.unexplained_mb, ledger.free_mb()) == (foreign_mb, 0, 100 - foreign_mb)


def test_a_loading_model_explains_no_measured_use() -> None:
    ledger = a_served_book(30, 30, LeaseState.RESERVED)
    assert (ledger.foreign_mb, ledger.free_mb()) == (30, 30)


def test_model_explains_its_lease_like_a_run_where_use_is_not_attributed() -> None:
    ledger = a_served_book(None, 45)
    assert (ledger.foreign_mb, ledger.unexplained_mb, ledger.free_mb()) == (0, 5, 55)
    [model] = ledger.holdings
    ledger.assume_released(model)
    assert (ledger.unexplained_mb, ledger.free_mb()) == (5, 95)


def a_measured_book(used_mb: int, foreign_mb: int | None = 0, **device: Any) -> DeviceLedger:
    """100 MiB, of which `low` has leased 60 and was seen to use 50 of what is in use."""
    ledger = DeviceLedger(a_device(mb=100, **device))
    ledger.put(a_lease(LOW, DEVICE.key, 60))
    by_holder = {} if foreign_mb is None else {"low:1": 50}
    ledger.measure(a_sample(DEVICE.key, used_mb=used_mb, foreign_mb=foreign_mb, by_holder=by_holder))
    return ledger


def test_use_by_unknown_processes_is_not_free() -> None:
    assert (a_measured_book(50).unexplained_mb, a_measured_book(50).free_mb()) == (0, 40)
    assert (a_measured_book(70).unexplained_mb, a_measured_book(70).free_mb()) == (20, 20)
    assert (a_measured_book(70, 5).unexplained_mb, a_measured_book(70, 5).free_mb()) == (15, 20)


def test_a_runs_use_is_free_only_after_a_sample_without_it() -> None:
    ledger = a_measured_book(50)
    ledger.put(a_lease(LOW, DEVICE.key, 60, state=LeaseState.RELEASED))
    assert (ledger.unexplained_mb, ledger.free_mb()) == (50, 50)
    ledger.measure(a_sample(DEVICE.key, NOW + 2.0))
    assert (ledger.unexplained_mb, ledger.free_mb()) == (0, 100)


@pytest.mark.parametrize(
    ("used_mb", "unexplained_mb", "free_mb", "free_without_it_mb"),
    [(60, 0, 40, 100), (40, 0, 40, 100), (75, 15, 25, 85), (0, 0, 40, 100)],
)
def test_memory_of_a_process_that_is_ending_is_its_runs_and_counts_once(
    used_mb: int, unexplained_mb: int, free_mb: int, free_without_it_mb: int
) -> None:
    """The run has ended and its process is no longer listed, but the driver has not freed all of it."""
    ledger = a_measured_book(60)
    ledger.put(a_lease(LOW, DEVICE.key, 60, state=LeaseState.RELEASING))
    ledger.measure(a_sample(DEVICE.key, used_mb=used_mb))
    assert (ledger.unexplained_mb, ledger.free_mb()) == (unexplained_mb, free_mb)
    [held] = ledger.holdings
    ledger.assume_released(held)
    assert (ledger.unexplained_mb, ledger.free_mb()) == (unexplained_mb, free_without_it_mb)


def test_listed_processes_may_add_up_to_more_than_is_in_use() -> None:
    assert a_measured_book(40).unexplained_mb == 0


def test_declared_foreign_memory_explains_use() -> None:
    ledger = a_measured_book(70, declared_foreign_mb=20)
    assert (ledger.foreign_mb, ledger.unexplained_mb, ledger.free_mb()) == (20, 0, 20)


def test_the_reserve_covers_unexplained_use() -> None:
    ledger = a_measured_book(70, reserve_mb=15)
    assert (ledger.unexplained_mb, ledger.free_mb()) == (5, 100 - 15 - 5 - 60)


@pytest.mark.parametrize(("used_mb", "unexplained_mb"), [(320, 0), (321, 321)])
def test_a_little_use_without_a_process_is_noise(used_mb: int, unexplained_mb: int) -> None:
    ledger = DeviceLedger(a_device())
    ledger.measure(a_sample(ledger.device.key, used_mb=used_mb))
    assert ledger.unexplained_mb == unexplained_mb


def test_where_use_cannot_be_attributed_use_beyond_the_leases_is_not_free() -> None:
    assert (a_measured_book(50, None).unexplained_mb, a_measured_book(50, None).free_mb()) == (0, 40)
    assert (a_measured_book(75, None).unexplained_mb, a_measured_book(75, None).free_mb()) == (15, 25)


def test_where_use_cannot_be_attributed_declared_use_is_not_counted_twice() -> None:
    ledger = a_measured_book(75, None, declared_foreign_mb=10)
    assert (ledger.foreign_mb, ledger.unexplained_mb, ledger.free_mb()) == (10, 5, 25)


@pytest.mark.parametrize(
    ("state", "unexplained_mb"),
    [
        (LeaseState.RESERVED, 75),
        (LeaseState.HELD, 15),
        (LeaseState.RELEASING, 15),
        (LeaseState.QUARANTINED, 15),
        (LeaseState.RELEASED, 75),
    ],
)
def test_only_a_run_that_may_use_memory_explains_use_nobody_can_attribute(
    state: LeaseState, unexplained_mb: int
) -> None:
    ledger = a_measured_book(75, None)
    ledger.put(a_lease(LOW, DEVICE.key, 60, state=state))
    assert ledger.unexplained_mb == unexplained_mb


def test_a_device_that_was_never_measured_hides_nothing() -> None:
    assert DeviceLedger(DEVICE).unexplained_mb == 0


def test_a_new_declaration_of_foreign_memory_counts_at_once() -> None:
    ledger = DeviceLedger(a_device(mb=100))
    assert ledger.free_mb() == 100
    ledger.register(a_device(mb=100, declared_foreign_mb=40))
    assert ledger.free_mb() == 60


def test_a_released_lease_leaves_the_ledger() -> None:
    ledger = a_book()
    ledger.put(a_lease(LOW, DEVICE.key, 60, state=LeaseState.RELEASED))
    assert ledger.free_mb() == 90
    assert ledger.held_mb() == 0


def test_of_a_pledge_only_the_part_that_its_victims_do_not_hold_is_kept() -> None:
    ledger = DeviceLedger(DEVICE)
    ledger.put(a_lease(LOW, DEVICE.key, 60), HIGH.id, stopping=True)
    pledge = a_pledge(HIGH, DEVICE.key, 70)
    ledger.pledges[HIGH.id] = pledge
    assert ledger.reserved_free_mb(pledge) == 10
    assert ledger.free_mb() == 20
    ledger.put(a_lease(LOW, DEVICE.key, 60, state=LeaseState.RELEASED))
    assert ledger.reserved_free_mb(pledge) == 70
    assert ledger.free_mb() == 20


def test_pledge_is_free_for_its_preemptor_and_strictly_higher_priorities() -> None:
    ledger = DeviceLedger(DEVICE)
    ledger.pledges[HIGH.id] = a_pledge(HIGH, DEVICE.key, 70)
    assert ledger.free_mb(priority=79) == 20
    assert ledger.free_mb(priority=80) == 20
    assert ledger.free_mb(priority=81) == 90
    assert ledger.free_mb(task=HIGH.id, priority=0) == 90


def test_a_pledge_with_a_quarantined_victim_is_kept_in_full() -> None:
    ledger = DeviceLedger(DEVICE)
    ledger.put(a_lease(LOW, DEVICE.key, 60, state=LeaseState.QUARANTINED), HIGH.id, stopping=True)
    pledge = a_pledge(HIGH, DEVICE.key, 70)
    ledger.pledges[HIGH.id] = pledge
    assert ledger.pledge_claim_mb(pledge) == 70
    assert ledger.free_after_releases_mb() == 30 - 70


def test_free_memory_is_kept_for_the_highest_priority_first() -> None:
    ledger = a_book(state=LeaseState.RELEASING)
    claims = [a_pledge(a_task(f"p{p}", priority=p), DEVICE.key, 20) for p in (20, 60, 40)]
    for claim in claims:
        ledger.pledges[claim.preemptor] = claim
    assert [ledger.reserved_free_mb(claim) for claim in claims] == [0, 20, 10]


def test_memory_being_freed_counts_as_free_soon_without_its_pledges() -> None:
    ledger = a_book(state=LeaseState.RELEASING)
    assert (ledger.free_mb(), ledger.free_after_releases_mb()) == (30, 90)
    ledger.pledges[HIGH.id] = a_pledge(HIGH, DEVICE.key, 70)
    assert ledger.free_after_releases_mb(priority=80) == 20
    assert ledger.free_after_releases_mb(priority=81) == 90


def test_a_copy_changes_nothing_in_the_original() -> None:
    ledger = a_book()
    copy = ledger.copy()
    copy.put(a_lease(HIGH, DEVICE.key, 20))
    copy.pledges[HIGH.id] = a_pledge(HIGH, DEVICE.key, 5)
    assert ledger.free_mb() == 30
    assert copy.free_mb() == 5


def test_a_device_is_stale_without_a_sample_and_after_three_periods() -> None:
    ledger = DeviceLedger(DEVICE)
    assert ledger.is_stale(NOW, 2.0)
    ledger.measure(a_sample(DEVICE.key, NOW))
    assert not ledger.is_stale(Instant(NOW + 6.0), 2.0)
    assert ledger.is_stale(Instant(NOW + 6.1), 2.0)
    assert ledger.sampled_at == NOW


def test_a_holder_on_an_unmeasured_device_gives_back_its_lease() -> None:
    ledger = a_book()
    [held] = ledger.holdings
    ledger.assume_released(held)
    assert (ledger.held_mb(), ledger.free_mb(), ledger.sample) == (0, 90, None)


CHANGES = st.one_of(
    st.tuples(
        st.just("put"),
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from(LeaseState),
        st.integers(1, 40),
        st.sampled_from([None, "high"]),
        st.booleans(),
    ),
    st.tuples(st.just("vacate"), st.sampled_from(["a", "b", "c"])),
    st.tuples(
        st.just("measure"),
        st.dictionaries(st.sampled_from(["a:1", "b:1", "c:1"]), st.integers(0, 60)),
        st.sampled_from([None, 0, 20]),
    ),
    st.tuples(st.just("copy")),
)


@given(changes=st.lists(CHANGES, max_size=12))
def test_a_ledgers_sums_equal_those_of_its_holdings_after_any_course(changes: list[Any]) -> None:
    ledger = DeviceLedger(DEVICE)
    for what, *how in changes:
        if what == "put":
            name, state, mb, freeing_for, stopping = how
            lease = a_lease(a_task(name, fence=1), DEVICE.key, mb, state=state)
            ledger.put(lease, freeing_for, stopping=stopping)
        elif what == "vacate" and (
            mine := [k for k, h in ledger.holdings.items() if h.lease.holder == how[0]]
        ):
            ledger.assume_released(mine[0])
        elif what == "measure":
            by_holder, foreign_mb = how
            sample = a_sample(DEVICE.key, by_holder=by_holder, foreign_mb=foreign_mb, used_mb=50)
            ledger.measure(sample)
        elif what == "copy":
            before = ledger
            ledger = before.copy()
            before.measure(a_sample(DEVICE.key, by_holder={"a:1": 99}))  # is none of the copy's business
        check_sums(ledger)


def check_sums(ledger: DeviceLedger) -> None:
    holdings = list(ledger.holdings.values())
    begun = [held for held in holdings if held.lease.state is not LeaseState.RESERVED]
    sample, used = ledger.sample, [held.measured_mb for held in holdings]
    unexplained = 0
    if sample is not None:
        ending = [held for held in holdings if held.lease.state is LeaseState.RELEASING]
        listed = sum(used) + sum(max(0, held.lease.mb - held.measured_mb) for held in ending)
        known = sum(held.lease.mb for held in begun) if sample.foreign_mb is None else listed
        unexplained = max(0, sample.used_mb - ledger.foreign_mb - known - DEVICE.reserve_mb)
    assert ledger.leased_mb() == sum(held.lease.mb for held in holdings)
    assert ledger.held_mb() == sum(max(held.lease.mb, held.measured_mb) for held in holdings)
    assert ledger.unexplained_mb == unexplained
    assert ledger.unallocated_mb() == 90 - ledger.foreign_mb - unexplained - ledger.held_mb()
    leaving = [held for held in holdings if held.is_leaving]
    assert sorted(ledger.leaving(), key=repr) == sorted(leaving, key=repr)
    assert ledger.releasing_mb(HIGH.id) == sum(h.occupied_mb for h in leaving if h.freeing_for == HIGH.id)


def test_requiring_a_new_sample_keeps_one_that_is_newer() -> None:
    ledger = a_book()
    ledger.measure(a_sample(DEVICE.key))
    ledger.require_new_sample(Instant(NOW - 1.0))
    assert ledger.sample is not None
    ledger.require_new_sample(Instant(NOW))
    assert ledger.sample is None


def test_quarantined_memory_is_a_part_of_what_is_leased() -> None:
    assert a_book().quarantined_mb() == 0
    ledger = a_book(state=LeaseState.QUARANTINED)
    assert (ledger.quarantined_mb(), ledger.leased_mb()) == (60, 60)
