"""The states of a request to a model server, and the table of the moves between them.

The table is the same for every protocol. A move that the table lacks raises IllegalMove.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class RequestState(StrEnum):
    RECEIVING = "receiving"
    """Nothing was sent to a server. The request's turn on the client's connection has not come, or its body
    must be complete first, as for a load that is searched for files or a request to several servers. A stream
    is in this state between two messages."""
    AWAITING_MODEL = "awaiting_model"
    """The request waits until its model is in memory or, for an unload, has left memory; or until the audit
    log has the request. The body counts as waiting bytes."""
    QUEUED = "queued"
    """The request's model is in memory, and the request waits in the model's lane for a slot. The body counts
    as waiting bytes."""
    SENT = "sent"
    """A server has the request and has not answered. The request may go to another server while its whole
    body is kept."""
    ANSWERING = "answering"
    """The answer goes to the client. The request is not sent again."""
    ANSWERED = "answered"
    """The end: the client has the server's answer."""
    FAILED = "failed"
    """The end: the client gets an error instead of an answer, or half an answer and a closed connection."""
    ABANDONED = "abandoned"
    """The end: the client has gone before its answer was complete."""


class RequestMove(StrEnum):
    AWAIT_MODEL = "await_model"
    """The ledger does not have the model in memory, or a server denies the model that the ledger has."""
    QUEUE = "queue"
    """The model is in memory, and its slots are taken."""
    SEND = "send"
    """The request is sent to a server, the first or another one."""
    ANSWER = "answer"
    """The head of the answer has arrived."""
    REST = "rest"
    """The stream to the server has ended, and the client's stream goes on."""
    FINISH = "finish"
    """The answer is complete."""
    FAIL = "fail"
    """The request is refused, or its server failed."""
    ABANDON = "abandon"
    """The client closes its connection, or cancels."""


class IllegalMove(Exception):
    def __init__(self, state: RequestState, move: RequestMove) -> None:
        super().__init__(
            f"a request that is {state} cannot {move}; it can {', '.join(NEXT[state]) or 'do nothing'}"
        )


class _Moves(dict[RequestMove, RequestState]):
    """The moves out of one state. A lookup of a move that exists calls no Python code; a missing move raises
    IllegalMove."""

    def __init__(self, state: RequestState, moves: Mapping[RequestMove, RequestState]) -> None:
        super().__init__(moves)
        self._state = state

    def __missing__(self, move: RequestMove) -> RequestState:
        raise IllegalMove(self._state, move)


_S, _M = RequestState, RequestMove

_TABLE: Final[Mapping[RequestState, Mapping[RequestMove, RequestState]]] = {
    _S.RECEIVING: {
        _M.AWAIT_MODEL: _S.AWAITING_MODEL,
        _M.QUEUE: _S.QUEUED,
        _M.SEND: _S.SENT,
        _M.FINISH: _S.ANSWERED,  # a stream whose messages all have their answers
        _M.FAIL: _S.FAILED,
        _M.ABANDON: _S.ABANDONED,
    },
    _S.AWAITING_MODEL: {
        _M.QUEUE: _S.QUEUED,
        _M.SEND: _S.SENT,
        _M.FAIL: _S.FAILED,
        _M.ABANDON: _S.ABANDONED,
    },
    _S.QUEUED: {
        _M.AWAIT_MODEL: _S.AWAITING_MODEL,  # the model has left meanwhile
        _M.SEND: _S.SENT,
        _M.FAIL: _S.FAILED,
        _M.ABANDON: _S.ABANDONED,
    },
    _S.SENT: {
        _M.AWAIT_MODEL: _S.AWAITING_MODEL,  # the server says that it does not have the model
        _M.SEND: _S.SENT,
        _M.ANSWER: _S.ANSWERING,
        _M.REST: _S.RECEIVING,
        _M.FAIL: _S.FAILED,
        _M.ABANDON: _S.ABANDONED,
    },
    _S.ANSWERING: {
        _M.REST: _S.RECEIVING,
        _M.FINISH: _S.ANSWERED,
        _M.FAIL: _S.FAILED,
        _M.ABANDON: _S.ABANDONED,
    },
    _S.ANSWERED: {},
    _S.FAILED: {},
    _S.ABANDONED: {},
}

NEXT: Final[Mapping[RequestState, Mapping[RequestMove, RequestState]]] = {
    state: _Moves(state, moves) for state, moves in _TABLE.items()
}
"""State -> move -> next state. Looking up a move raises IllegalMove if the state does not allow it."""

ENDS: Final = frozenset(state for state, moves in _TABLE.items() if not moves)
