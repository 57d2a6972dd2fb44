"""What tenants hold and have used."""

from math import log

import pytest
from gpubroker_server.core.domain.policy import Policy, TenantPolicy
from gpubroker_server.core.domain.units import Instant, Mib, Seconds
from gpubroker_server.core.world.tenant_accounts import Accounts, decayed, guarantees, mean_life_seconds
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import a_device, a_task, a_world, holding, let_go

DAY = Seconds(86_400.0)


def test_use_counts_half_after_its_half_life() -> None:
    assert decayed(1000.0, 0, DAY, DAY) == 500.0


def test_holding_for_ever_comes_to_the_size_times_the_mean_life() -> None:
    assert decayed(0.0, 10, 100 * DAY, DAY) == pytest.approx(10 * DAY / log(2.0))
    assert mean_life_seconds(DAY) == DAY / log(2.0)


def test_a_short_use_counts_in_full_at_first() -> None:
    assert decayed(0.0, 10, 1.0, DAY) == pytest.approx(10.0, rel=1e-4)


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(0.0, 1e5)), min_size=1, max_size=8))
def test_reading_an_account_changes_nothing(spans: list[tuple[int, float]]) -> None:
    """The integral is exact: it does not matter into how many pieces a time is cut."""
    looked, plain = Accounts(DAY), Accounts(DAY)
    now = 0.0
    for mb, seconds in spans:
        for accounts in (looked, plain):
            accounts.change("acme", mb - accounts.held_mb("acme"), Instant(now))
        for part in (0.2, 0.7):
            looked.change("acme", 0, Instant(now + part * seconds))
        now += seconds
    used = [accounts.used("acme", Instant(now)) for accounts in (looked, plain)]
    assert used[0] == pytest.approx(used[1], rel=1e-9, abs=1e-6)


def test_use_is_restored_from_rows_and_goes_on() -> None:
    before, again = Accounts(DAY), Accounts(DAY)
    for tenant, mb in (("zeta", 20), ("acme", 10)):
        before.change(tenant, mb, Instant(0.0))
        again.change(tenant, mb, Instant(300.0))
        before.change(tenant, 0, Instant(300.0))
    rows = before.rows()
    assert [row.tenant for row in rows] == ["acme", "zeta"]
    for row in rows:
        again.restore(row)
    for tenant in ("acme", "zeta"):
        assert again.used(tenant, Instant(500.0)) == before.used(tenant, Instant(500.0)) > 0.0


def test_a_clock_that_is_set_back_removes_no_use() -> None:
    accounts = Accounts(DAY)
    accounts.change("acme", 10, Instant(100.0))
    accounts.change("acme", 0, Instant(200.0))
    before = accounts.used("acme", Instant(200.0))
    accounts.change("acme", 0, Instant(150.0))
    assert accounts.used("acme", Instant(200.0)) == before


def test_a_lease_counts_for_its_tenant_until_it_is_released() -> None:
    world = a_world(a_device(), holding(a_task("run", tenant="acme", gpu_mb=1024), "gpu0"))
    assert world.accounts.held_mb("acme") == 1024
    assert world.accounts.used("acme", Instant(world.as_of + 10.0)) == pytest.approx(10_240, rel=1e-3)
    let_go(world, "run")
    assert world.accounts.held_mb("acme") == 0


def test_a_new_tenant_has_used_nothing() -> None:
    assert Accounts().used("nobody", Instant(5.0)) == 0.0
    assert Accounts().held_mb("nobody") == 0


def test_the_tenants_that_hold_most_come_first() -> None:
    accounts = Accounts(DAY)
    for tenant, mb in (("a", 5), ("b", 9), ("c", 7)):
        accounts.change(tenant, mb, Instant(0.0))
    assert accounts.largest(2) == [("b", 9), ("c", 7)]


def test_guarantees_that_nobody_uses_come_before_those_of_other_tenants() -> None:
    policy = Policy(
        tenants=(TenantPolicy("acme", "lab", Mib(5)), TenantPolicy("open"), TenantPolicy("*", "lab", Mib(1)))
    )
    assert guarantees(policy, ["beta", "acme"], 9) == {"acme": 5, "beta": 1}
    assert guarantees(policy, ["beta"], 2) == {"acme": 5}
