"""Models of servers, as a table for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from gpubroker.cli.layout import Column, Rows, ago, size
from gpubroker.models.served import ServedModel

_COLUMNS = (
    Column("MODEL", share=0.3),
    Column("SERVER"),
    Column("STATE"),
    Column("PRIORITY"),
    Column("MEMORY"),
    Column("LOADED"),
    Column("NOTE", wraps=True),
)


def models(listed: Sequence[ServedModel]) -> RenderableType:
    rows = [
        (
            one.name,
            one.server,
            one.state,
            "pinned" if one.pinned else "" if one.priority is None else str(one.priority),
            "" if one.gpu_mb is None else size(one.gpu_mb),
            "" if one.loaded_at is None else ago(one.loaded_at),
            " ".join((one.reason or "").split()),
        )
        for one in listed
    ]
    return Rows(_COLUMNS, rows) if rows else Text("there are no models")


def model(shown: ServedModel) -> RenderableType:
    of = "" if shown.gpu_mb is None else f" of {size(shown.gpu_mb)}"
    pinned = ", pinned" if shown.pinned else ""
    return Text(f"{shown.name}{of} on {shown.server}: {shown.state}{pinned}")


def asked_for(shown: ServedModel) -> RenderableType:
    """What is accepted is not done yet."""
    if shown.state == "resident":
        return model(shown)
    sees = ["gpubroker models"] + ([f"gpubroker explain {shown.task}"] if shown.task else [])
    told = f"\nasked for, and not in memory yet; how it stands: {', '.join(sees)}"
    return Text.assemble(str(model(shown)), told, f"\n{shown.reason}" if shown.reason else "")


def model_server(of: Mapping[str, Any]) -> str:
    """One server of models: whether it answers, and if not why."""
    ways = {name: of[name] for name in ("http", "grpc") if of.get(name)}
    down = [f"! {of['node_fault']}"] if of.get("node_fault") else []
    down += [f"! {name} is not asked: {way.get('fault')}" for name, way in ways.items() if not way.get("up")]
    return " · ".join([str(of.get("name")), *(down or [f"up, {of.get('requests_in_flight')} requests"])])
