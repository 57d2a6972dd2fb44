"""The operator's choices on one screen."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType

from gpubroker.cli.draw import facts
from gpubroker.cluster.policy import Policy


def policy(shown: Policy) -> RenderableType:
    return facts((name, text) for name, text in _rows(shown) if text)


def _rows(shown: Policy) -> Iterator[tuple[str, str]]:
    yield "bands", " · ".join(f"{band['name']} {band['lowest']} to {band['highest']}" for band in shown.bands)
    yield "placement", shown.placement
    yield "preemption", _preemption(shown.preemption)
    yield "defaults", _given(shown.defaults)
    yield "at most", _given(shown.maximum)
    for name, rows, key in (
        ("kind", shown.kinds, "name"),
        ("pool", shown.pools, "name"),
        ("custom", shown.custom_limits, "name"),
        ("running", shown.max_running, "of"),
        ("model type", shown.model_types, "name"),
        ("tenant", shown.tenants, "name"),
    ):
        for row in rows:
            rest = _given({field: value for field, value in row.items() if field != key})
            yield name, f"{row[key]}: {rest}"
    yield "streams", _given(shown.streams)


def _preemption(chosen: Mapping[str, Any]) -> str:
    if not chosen.get("enabled", True):
        return "off"
    return _given({name: value for name, value in chosen.items() if name != "enabled"})


def _given(fields: Mapping[str, Any]) -> str:
    said = (f"{name} {_plain(value)}" for name, value in fields.items() if value not in (None, "", [], {}))
    return " · ".join(said)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return " ".join(f"{name}={_plain(of)}" for name, of in value.items())
    return ",".join(value) if isinstance(value, list) else str(value)
