"""A server that fails several times in a row gets no requests for a while."""

from gpubroker_server.core.domain.units import MonotonicSeconds, Seconds
from gpubroker_server.core.serving.circuit_breaker import Breaker, BreakerRules

RULES = BreakerRules(3, Seconds(1.0), Seconds(4.0), Seconds(60.0))


def a_breaker(*faults_at: float) -> Breaker:
    breaker = Breaker(RULES)
    for at in faults_at:
        breaker.failed(MonotonicSeconds(at), "no connection")
    return breaker


def test_faults_in_a_row_open_it_unless_an_answer_comes_in_between() -> None:
    breaker = a_breaker(0.0, 0.1)
    assert not breaker.is_open
    assert not breaker.answered(MonotonicSeconds(0.2))
    assert breaker.fault == ""
    assert [breaker.failed(MonotonicSeconds(at), "gone") for at in (0.3, 0.4, 0.5, 0.6)] == [
        False,
        False,
        True,
        False,
    ]
    assert (breaker.is_open, breaker.fault) == (True, "gone")


def test_the_first_answer_after_the_pause_closes_it() -> None:
    breaker = a_breaker(0.0, 0.0, 0.0)
    assert not breaker.answered(MonotonicSeconds(0.9))
    assert breaker.is_open
    assert breaker.answered(MonotonicSeconds(1.0))
    assert (breaker.is_open, breaker.fault) == (False, "")
    assert not breaker.answered(MonotonicSeconds(1.1))


def pauses(breaker: Breaker, at: float, count: int) -> tuple[list[float], float]:
    """How long it stays open, each time that all requests fail right after it was closed."""
    found = []
    for _ in range(count):
        for _ in range(3):
            breaker.failed(MonotonicSeconds(at), "gone")
        opened = at
        while not breaker.answered(MonotonicSeconds(at)):
            at += 0.5
        found.append(at - opened)
    return found, at


def test_the_pause_grows_for_a_server_that_answers_and_fails_in_turn() -> None:
    breaker = Breaker(RULES)
    found, at = pauses(breaker, 0.0, 4)
    assert found == [1.0, 2.0, 4.0, 4.0]
    assert pauses(breaker, at + 60.0, 1)[0] == [1.0]


def test_it_has_default_rules() -> None:
    breaker = Breaker()
    opened = [breaker.failed(MonotonicSeconds(0.0), "gone") for _ in range(3)]
    assert opened == [False, False, True]


def test_breaker_tells_for_how_long_it_has_been_open() -> None:
    breaker = a_breaker(0.0, 0.1)
    assert breaker.open_seconds(MonotonicSeconds(5.0)) == 0.0
    breaker.failed(MonotonicSeconds(1.0), "no connection")
    assert breaker.open_seconds(MonotonicSeconds(1.5)) == 0.5
