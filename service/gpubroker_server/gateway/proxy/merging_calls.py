"""Answers of several servers over gRPC made one, as `merging` does with those over HTTP; by field numbers of
`grpc_service.proto`."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from gpubroker_server.ports.protowire import field, fields

_BEST_FIRST = (b"READY", b"LOADING", b"UNLOADING", b"UNAVAILABLE")

_ROWS = 1
_NAME, _VERSION = 1, 2
_STATE = 3
_LAST_INFERENCE, _INFERENCES, _EXECUTIONS, _TIMES, _BATCHES, _MEMORY, _RESPONSES = 3, 4, 5, 6, 7, 8, 9
_KEY = 1

Values = dict[int, list[int | bytes]]
"""By field number, in their order."""


def chosen_live(messages: Sequence[bytes]) -> bytes:
    """Of answers whose first field says whether a server lives, or serves: one that does."""
    return next((message for message in messages if _values(message)[1] == [1]), messages[0])


def merged_index(messages: Sequence[bytes]) -> bytes:
    rows = [row for message in messages for row in _values(message)[_ROWS] if isinstance(row, bytes)]
    told = [(_values(row), row) for row in rows]
    with_version = {_text(values, _NAME) for values, _ in told if values[_VERSION]}
    best: dict[tuple[bytes, bytes], tuple[int, bytes]] = {}
    for values, row in told:
        key = _text(values, _NAME), _text(values, _VERSION)
        if not key[1] and key[0] in with_version:
            continue
        state = _text(values, _STATE)
        rank = _BEST_FIRST.index(state) if state in _BEST_FIRST else len(_BEST_FIRST)
        best[key] = min(best.get(key, (rank, row)), (rank, row), key=lambda told: told[0])
    return b"".join(field(_ROWS, row) for _, row in best.values())


def summed_statistics(messages: Sequence[bytes]) -> bytes:
    rows: defaultdict[tuple[bytes, bytes], list[bytes]] = defaultdict(list)
    for message in messages:
        for row in _values(message)[_ROWS]:
            if isinstance(row, bytes):
                values = _values(row)
                rows[_text(values, _NAME), _text(values, _VERSION)].append(row)
    return b"".join(field(_ROWS, same[0] if len(same) == 1 else _summed(same)) for same in rows.values())


def _summed(rows: Sequence[bytes]) -> bytes:
    """Of one version of a model."""
    values = _together(rows)
    last = max((one for one in values[_LAST_INFERENCE] if isinstance(one, int)), default=0)
    return b"".join(
        (
            field(_NAME, _text(values, _NAME)),
            field(_VERSION, _text(values, _VERSION)),
            field(_LAST_INFERENCE, last),
            *(field(number, _total(values[number])) for number in (_INFERENCES, _EXECUTIONS)),
            field(_TIMES, _sum(values[_TIMES])),
            *(field(_BATCHES, batch) for batch in _by_key(values[_BATCHES])),
            *(field(_MEMORY, used) for used in values[_MEMORY]),
            *(field(_RESPONSES, response) for response in _by_key(values[_RESPONSES])),
        )
    )


def _by_key(messages: Iterable[int | bytes]) -> list[bytes]:
    """Those with the same first field summed in all others."""
    alike: defaultdict[int | bytes, list[bytes]] = defaultdict(list)
    for message in messages:
        if isinstance(message, bytes):
            alike[next(iter(_values(message)[_KEY]), 0)].append(message)
    return [
        field(_KEY, key)
        + b"".join(_added(number, values) for number, values in _together(same).items() if number != _KEY)
        for key, same in alike.items()
    ]


def _sum(messages: Iterable[int | bytes]) -> bytes:
    """Of messages that hold numbers, or messages that do, and so on."""
    values = _together(message for message in messages if isinstance(message, bytes))
    return b"".join(_added(number, each) for number, each in values.items())


def _added(number: int, values: Sequence[int | bytes]) -> bytes:
    return field(number, _total(values) if isinstance(values[0], int) else _sum(values))


def _total(values: Iterable[int | bytes]) -> int:
    return sum(value for value in values if isinstance(value, int))


def _text(values: Values, number: int) -> bytes:
    return next((value for value in values[number] if isinstance(value, bytes)), b"")


def _together(messages: Iterable[bytes]) -> Values:
    values: Values = defaultdict(list)
    for message in messages:
        for number, value in fields(message):
            values[number].append(value)
    return values


def _values(message: bytes) -> Values:
    return _together([message])
