"""Send one request to several servers, and merge their answers into one."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

from gpubroker_server.http.problems import Problem
from gpubroker_server.inference.operation import FanOut
from gpubroker_server.inference.refusals import problem_of
from gpubroker_server.inference.servers import Server
from gpubroker_server.ports.backends import CallFailed, Fetched, Trouble

FAN_OUT_SECONDS: Final = 10.0
"""The longest time that a server may take. A slower server is left out of the answer."""

_OK: Final = 200

Row = dict[str, Any]
"""A row of an index or of statistics, as Triton writes it in JSON."""

T = TypeVar("T")

_BEST_FIRST: Final = ("READY", "LOADING", "UNLOADING", "UNAVAILABLE")
"""States of a model's version, best first. Of the states that several servers report, the merged answer has
the best."""


async def ask_all(servers: Sequence[Server], how: FanOut, ask: Callable[[Server], Awaitable[T]]) -> list[T]:
    """Return the answers of the servers that have answered, in the order of the servers. `ask` raises Problem
    or CallFailed; `ask_all` raises the first failure if `how` is EACH or no server has answered."""
    # All servers are asked even if one fails, so that a change reaches all that can be reached.
    if how is FanOut.EACH:
        outcomes = [await _outcome(ask(server)) for server in servers]
    else:
        outcomes = await asyncio.gather(*(_outcome(ask(server)) for server in servers))
    answers = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if failures and (how is FanOut.EACH or not answers):
        raise failures[0]
    return answers


async def _outcome(asked: Awaitable[T]) -> T | Problem | CallFailed:
    try:
        return await asked
    except (Problem, CallFailed) as failure:
        return failure


def merged_index(indexes: Iterable[Sequence[Row]]) -> list[Row]:
    """Return one row per version of a model, and one row for a model of which no server has a version."""
    rows = [row for index in indexes for row in index]
    with_version = {row["name"] for row in rows if "version" in row}
    best: dict[tuple[str, str], Row] = {}
    for row in rows:
        if "version" not in row and row["name"] in with_version:
            continue
        key = row["name"], row.get("version", "")
        best[key] = min(best.get(key, row), row, key=_rank)
    return list(best.values())


def _rank(row: Row) -> int:
    state = row.get("state", "")
    return _BEST_FIRST.index(state) if state in _BEST_FIRST else len(_BEST_FIRST)


def summed_statistics(statistics: Iterable[Sequence[Row]]) -> list[Row]:
    """Return one row per version of a model. Counts and times are added, the time of the last request is the
    latest one, and the memory of all servers is listed."""
    summed: dict[tuple[str, str], Row] = {}
    for row in (row for rows in statistics for row in rows):
        key = row["name"], row.get("version", "")
        summed[key] = _both(summed[key], row) if key in summed else row
    return list(summed.values())


def _both(first: Row, second: Row) -> Row:
    joined: Row = _sum(first, second)
    # These two are not sums: a time, and a list that has one row per size of batch.
    joined["last_inference"] = max(first.get("last_inference", 0), second.get("last_inference", 0))
    batches: dict[int, Row] = {}
    for batch in (*first.get("batch_stats", ()), *second.get("batch_stats", ())):
        size = batch["batch_size"]
        batches[size] = {**_sum(batches.get(size), batch), "batch_size": size}
    joined["batch_stats"] = [batches[size] for size in sorted(batches)]
    return joined


def _sum(first: Any, second: Any) -> Any:
    """Add numbers, add dictionaries key by key, join lists, and keep the first of two texts."""
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, dict):
        return {name: _sum(first.get(name), second.get(name)) for name in {**first, **second}}
    return first + second if isinstance(first, (int, float, list)) else first


def merged_response(how: FanOut, answers: Sequence[Fetched], servers: Sequence[Server]) -> Fetched:
    """Return one answer that merges the answers of several servers. Raises Problem if they cannot be
    merged."""
    good = [answer for answer in answers if answer.status == _OK]
    if how is FanOut.EACH:
        return next((answer for answer in answers if answer.status != _OK), answers[0])
    if len(good) < 2 or how is FanOut.ANY:
        return good[0] if good else answers[0]
    try:
        bodies = [json.loads(answer.body) for answer in good]
        if how is FanOut.INDEX:
            merged: object = merged_index(bodies)
        else:
            merged = {"model_stats": summed_statistics(body["model_stats"] for body in bodies)}
    except (ValueError, KeyError, TypeError) as fault:
        names = ", ".join(server.name for server in servers)
        detail = f"the answers cannot be merged: {fault!r}"
        raise problem_of(Trouble.BROKEN, names, detail) from None
    return good[0]._replace(body=json.dumps(merged, separators=(",", ":")).encode())
