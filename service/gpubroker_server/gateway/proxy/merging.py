"""Answers of several servers made one, in the form that Triton gives them: what they have, and have done."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_BEST_FIRST = ("READY", "LOADING", "UNLOADING", "UNAVAILABLE")
"""Of what several servers say of one version of a model, the first of these counts."""

Row = Mapping[str, Any]


def merged_index(bodies: Sequence[bytes]) -> bytes:
    """Each version of a model once; a model without any once, unless another server has one."""
    rows = [row for body in bodies for row in json.loads(body)]
    with_version = {row["name"] for row in rows if "version" in row}
    best: dict[tuple[str, str], Row] = {}
    for row in rows:
        if "version" not in row and row["name"] in with_version:
            continue
        key = row["name"], row.get("version", "")
        best[key] = min(best.get(key, row), row, key=_rank)
    return _written(list(best.values()))


def summed_statistics(bodies: Sequence[bytes]) -> bytes:
    """Of each version of a model: counts and times added, the last request of all, memory side by side."""
    rows = [row for body in bodies for row in json.loads(body)["model_stats"]]
    summed: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = row["name"], row.get("version", "")
        summed[key] = _both(summed[key], row) if key in summed else row
    return _written({"model_stats": list(summed.values())})


def _rank(row: Row) -> int:
    state = row.get("state", "")
    return _BEST_FIRST.index(state) if state in _BEST_FIRST else len(_BEST_FIRST)


def _both(one: Row, other: Row) -> Row:
    joined = {name: _sum(one.get(name), other.get(name)) for name in {**one, **other}}
    joined["last_inference"] = max(one.get("last_inference", 0), other.get("last_inference", 0))
    batches = {batch["batch_size"]: batch for batch in one.get("batch_stats", ())}
    for batch in other.get("batch_stats", ()):
        size = batch["batch_size"]
        batches[size] = {**_sum(batches.get(size), batch), "batch_size": size}
    joined["batch_stats"] = [batches[size] for size in sorted(batches)]
    return joined


def _sum(one: Any, other: Any) -> Any:
    """Of numbers; of what holds them by name, each; of lists all that they hold. Of texts the first."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, dict):
        return {name: _sum(one.get(name), other.get(name)) for name in {**one, **other}}
    return one + other if isinstance(one, (int, float, list)) else one


def _written(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
