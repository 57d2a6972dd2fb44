"""How long a leader may count on its term, and when a candidate may take the next one."""

import pytest
from gpubroker_server.core.domain.leader_term import (
    NEVER,
    UNTIL_PROCESS_EXIT,
    LeaderRow,
    LeaderTerm,
    LeaderTermRules,
    ObservedLeader,
    RefusedTerm,
    next_lineage,
    refused_term,
)
from gpubroker_server.core.domain.units import Instant, Lineage, MonotonicSeconds, Seconds, Term
from msgspec.structs import replace

from tests.builders import NOW

RULES = LeaderTermRules(ttl_seconds=Seconds(3.0), margin_seconds=Seconds(0.75), renew_seconds=Seconds(1.0))
ROW = LeaderRow(Term(4), "host:1", Instant(NOW + 3.0), Instant(NOW))


def a_leader_term(asked_at: float = 100.0) -> LeaderTerm:
    return LeaderTerm(Term(4), RULES.trusted_until(MonotonicSeconds(asked_at)))


def test_term_counts_from_its_request_and_ends_before_others_may_take_it() -> None:
    leader_term = a_leader_term(asked_at=100.0)
    assert not leader_term.is_over(MonotonicSeconds(102.24))
    assert leader_term.is_over(MonotonicSeconds(102.25))
    assert leader_term.until < 100.0 + RULES.ttl_seconds


def test_there_is_time_for_a_second_renewal_before_a_term_ends() -> None:
    rules = LeaderTermRules()
    assert rules.trusted_until(MonotonicSeconds(0.0)) >= 2 * rules.renew_seconds


def test_next_renewal_counts_from_the_last_request_not_from_its_answer() -> None:
    assert RULES.renew_at(a_leader_term(asked_at=100.0).until) == 101.0


def test_a_term_that_was_over_once_stays_over_whatever_is_granted_later() -> None:
    leader_term = a_leader_term()
    assert leader_term.is_over(MonotonicSeconds(500.0))
    leader_term.extend(MonotonicSeconds(1000.0))
    assert leader_term.is_over(MonotonicSeconds(501.0))
    assert leader_term.seconds_left(MonotonicSeconds(501.0)) == 0.0
    assert leader_term.until < 0


def test_renewal_extends_a_term_and_one_out_of_order_does_not_shorten_it() -> None:
    leader_term = a_leader_term()
    leader_term.extend(MonotonicSeconds(110.0))
    leader_term.extend(MonotonicSeconds(105.0))
    assert leader_term.seconds_left(MonotonicSeconds(107.0)) == 3.0
    assert not leader_term.is_over(MonotonicSeconds(109.9))


def test_a_term_without_a_lease_is_never_over() -> None:
    assert not LeaderTerm(Term(1)).is_over(MonotonicSeconds(1e12))
    assert LeaderTerm(Term(1)).until == NEVER


def test_a_candidate_waits_while_the_leader_renews() -> None:
    watched = ObservedLeader(ROW, MonotonicSeconds(0.0))
    for second in range(1, 10):
        row = replace(ROW, lease_until=Instant(NOW + 3.0 + second), at=Instant(NOW + second))
        watched = watched.next(row, MonotonicSeconds(float(second)))
        assert not watched.may_take(MonotonicSeconds(float(second)), RULES)


def test_candidate_takes_over_when_the_database_clock_is_past_the_lease() -> None:
    row = replace(ROW, at=ROW.lease_until)
    assert ObservedLeader(row, MonotonicSeconds(0.0)).may_take(MonotonicSeconds(0.0), RULES)


@pytest.mark.parametrize(("seconds", "may_take"), [(3.0, False), (3.1, True)])
def test_candidate_takes_over_without_renewals_even_if_the_clock_went_back(
    seconds: float, may_take: bool
) -> None:
    """It is the clock of the database that went back."""
    row = replace(ROW, at=Instant(NOW - 3600.0))
    watched = ObservedLeader(row, MonotonicSeconds(0.0)).next(row, MonotonicSeconds(seconds))
    assert watched.may_take(MonotonicSeconds(seconds), RULES) is may_take


def test_a_lineage_is_above_the_last_one_and_above_every_claim_made_so_far() -> None:
    in_2026 = Instant(1_790_000_000.0)
    first = next_lineage(Lineage(0), in_2026)
    assert first > 365 * 86_400
    assert next_lineage(first, Instant(in_2026 + 60.0)) == first + 60
    assert next_lineage(first, Instant(in_2026 - 3600.0)) == first + 1  # the clock was set back


KNOWN_HERE = replace(ROW, lineage=Lineage(10))


@pytest.mark.parametrize(
    ("row", "known", "says"),
    [
        (replace(KNOWN_HERE, term=Term(5)), (10, 5), RefusedTerm.OVER),
        (replace(KNOWN_HERE, term=Term(5)), (10, 9), RefusedTerm.OVER),
        (KNOWN_HERE, (10, 5), RefusedTerm.LOST),
        (KNOWN_HERE, (11, 1), RefusedTerm.ELSEWHERE),
        (KNOWN_HERE, (10, 4), RefusedTerm.LOST),
        (KNOWN_HERE, (10, 3), RefusedTerm.NOTHING),
        (KNOWN_HERE, (9, 99), RefusedTerm.NOTHING),
    ],
)
def test_a_refusal_says_that_another_leads_or_that_the_database_went_back(
    row: LeaderRow, known: tuple[int, int], says: RefusedTerm
) -> None:
    assert refused_term(row, Term(4), (Lineage(known[0]), Term(known[1]))) is says


def test_a_term_that_was_ended_stays_over() -> None:
    leader_term = LeaderTerm(Term(1))
    leader_term.end()
    leader_term.extend(MonotonicSeconds(1e9))
    assert leader_term.is_over(MonotonicSeconds(0.0))
    assert leader_term.until < 0


def test_with_an_exclusive_lock_a_term_lasts_until_the_process_ends() -> None:
    row = replace(ROW, lease_until=Instant(NOW + UNTIL_PROCESS_EXIT.ttl_seconds))
    assert not ObservedLeader(row, MonotonicSeconds(0.0)).may_take(MonotonicSeconds(1e6), UNTIL_PROCESS_EXIT)
    assert ObservedLeader(replace(row, lease_until=Instant(0.0)), MonotonicSeconds(0.0)).may_take(
        MonotonicSeconds(0.0), RULES
    )
