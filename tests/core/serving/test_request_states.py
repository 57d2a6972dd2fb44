"""The table of a request's states: every pair of it, and every pair that it lacks."""

from itertools import product

import pytest
from gpubroker_server.core.serving.request_states import ENDS, NEXT, IllegalMove, RequestMove, RequestState

PAIRS = list(product(RequestState, RequestMove))
LEGAL = {(state, move) for state, moves in NEXT.items() for move in moves}


def test_every_state_has_its_moves_in_the_table() -> None:
    assert NEXT.keys() == set(RequestState)
    assert {RequestState.ANSWERED, RequestState.FAILED, RequestState.ABANDONED} == ENDS


@pytest.mark.parametrize(("state", "move"), sorted(set(PAIRS) - LEGAL))
def test_an_illegal_move_raises_and_names_state_and_move(state: RequestState, move: RequestMove) -> None:
    with pytest.raises(IllegalMove) as illegal:
        NEXT[state][move]
    allowed = ", ".join(NEXT[state]) or "do nothing"
    assert str(illegal.value) == f"a request that is {state} cannot {move}; it can {allowed}"


def test_every_request_may_fail_or_be_abandoned_until_its_end() -> None:
    for state in set(RequestState) - ENDS:
        assert NEXT[state][RequestMove.FAIL] is RequestState.FAILED
        assert NEXT[state][RequestMove.ABANDON] is RequestState.ABANDONED


def test_nothing_is_sent_again_once_an_answer_has_begun() -> None:
    """Only a stream goes on, with its next message."""
    assert RequestMove.SEND not in NEXT[RequestState.ANSWERING]
    assert RequestMove.AWAIT_MODEL not in NEXT[RequestState.ANSWERING]


def test_every_state_and_every_move_can_happen() -> None:
    reached, new = set(), {RequestState.RECEIVING}
    while new:
        reached |= new
        new = {after for state in new for after in NEXT[state].values()} - reached
    assert reached == set(RequestState)
    assert {move for _, move in LEGAL} == set(RequestMove)
