"""What a service did, read back from its own events: who was there, what was asked for, how long it ran."""

import json
from collections.abc import Container, Iterable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from gpubroker_server.core.domain.device import Device, Node
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import DeviceKey, Instant, NodeName, TaskId
from gpubroker_server.core.world.event_codec import device_from, node_from, task_from

from bench.measuring import say
from bench.simulate.work import Scene, Work

_ENDS = ("task.succeeded", "task.failed", "task.cancelled", "task.expired")
_EXPORT = "gpubroker events --after 0 -o ndjson > history.ndjson"
_BREAKS = ("task.requeued", *_ENDS)


class NoHistory(SystemExit):
    """The file does not hold what is needed; the text says what to do."""


def a_history(path: Path) -> Scene:
    """The events of one log from its beginning. Left out are tasks that never ran, and what a replay has
    nobody for: external leases and models. Raises NoHistory."""
    events = _events(path)
    nodes: dict[NodeName, Node] = {}
    devices: dict[DeviceKey, Device] = {}
    for event in events:
        if event["kind"] == "node.seen":
            node = node_from(event["fields"])
            nodes[node.name] = node
        elif event["kind"] == "device.seen":
            device = device_from(event["fields"])
            devices[device.key] = device
    works = list(_works(events))
    if not devices or not works:
        raise NoHistory(
            f"{path} has {len(devices)} devices and {len(works)} tasks that ran; export the whole log: "
            f"{_EXPORT}"
        )
    works.sort(key=lambda work: (work.task.submitted_at, work.task.id))
    return Scene(f"history-{path.stem}", list(nodes.values()), list(devices.values()), works)


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        events = [item for line in lines for item in line.get("items", [line])]
        whole = all({"key", "at", "fields", "kind"} <= event.keys() for event in events)
    except OSError as error:
        raise NoHistory(f"cannot read {path}: {error.strerror}; make it with {_EXPORT}") from None
    except (ValueError, AttributeError):
        whole = False
    if not whole:
        raise NoHistory(f"{path} does not hold one event as JSON per line; make it with {_EXPORT}")
    return events


def _works(events: Iterable[dict[str, Any]]) -> Iterable[Work]:
    tasks: dict[TaskId, Task] = {}
    started: dict[TaskId, float] = {}
    ran: dict[TaskId, float] = {}
    saved: set[TaskId] = set()
    for event in events:
        key, at, fields = TaskId(event["key"]), _seconds(event["at"]), event["fields"]
        match event["kind"]:
            case "task.submitted":
                tasks[key] = task_from({name: _plain(name, value) for name, value in fields.items()})
            case "task.started":
                started[key] = at
            case kind if kind in _BREAKS and key in started:
                ran[key] = ran.get(key, 0.0) + at - started.pop(key)
        if fields.get("checkpoint_at") is not None:
            saved.add(key)
    others = [key for key in ran if key in tasks and not tasks[key].is_run]
    if others:
        say(f"left out: {len(others)} external leases and models, whose memory counts as free")
    for key in others:
        del ran[key]
    for key, seconds in ran.items():
        if key in tasks:
            yield Work(_after_those(tasks[key], ran), max(seconds, 0.001), checkpoints=key in saved)


def _after_those(task: Task, ran: Container[TaskId]) -> Task:
    """Whoever never ran is left out of the replay, and nobody can wait for him."""
    after = tuple(dependency for dependency in task.after if dependency.task in ran)
    return replace(task, after=after, awaits=bool(after))


def _plain(name: str, value: Any) -> Any:
    """The API tells instants as people read them; rows keep seconds."""
    is_instant = name.endswith("_at") or name == "not_before"
    return Instant(_seconds(value)) if is_instant and isinstance(value, str) else value


def _seconds(at: str | float) -> float:
    return (
        at if isinstance(at, int | float) else datetime.fromisoformat(at.replace("Z", "+00:00")).timestamp()
    )
