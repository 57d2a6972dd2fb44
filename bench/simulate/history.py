"""The history of a service, read from its events: its nodes, devices, tasks, and their run times."""

import json
from collections.abc import Container, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from gpubroker_server.core.domain.device import Device, Node
from gpubroker_server.core.domain.holders import is_started_by_agent
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import DeviceKey, Instant, NodeName, TaskId
from gpubroker_server.core.world.payload import read, read_task
from msgspec.structs import replace

from bench.measuring import report
from bench.simulate.workload import Job, Workload

_ENDS = ("task.succeeded", "task.failed", "task.cancelled", "task.expired")
_EXPORT = "gpubroker events --after 0 -o ndjson > history.ndjson"
_RUN_ENDS = ("task.requeued", *_ENDS)


class NoHistory(SystemExit):
    """The file is not a complete history; the text says how to export one."""


def a_history(path: Path) -> Workload:
    """Return the jobs of a whole log. Tasks that never ran, external leases and models are left out. Raises
    NoHistory."""
    events = _events(path)
    nodes: dict[NodeName, Node] = {}
    devices: dict[DeviceKey, Device] = {}
    for event in events:
        if event["kind"] == "node.seen":
            node = read(event["fields"], Node)
            nodes[node.name] = node
        elif event["kind"] == "device.seen":
            device = read(event["fields"], Device)
            devices[device.key] = device
    jobs = list(_jobs(events))
    if not devices or not jobs:
        raise NoHistory(
            f"{path} has {len(devices)} devices and {len(jobs)} tasks that ran; export the whole log: "
            f"{_EXPORT}"
        )
    jobs.sort(key=lambda job: (job.task.submitted_at, job.task.id))
    return Workload(f"history-{path.stem}", list(nodes.values()), list(devices.values()), jobs)


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        events = [item for line in lines for item in line.get("items", [line])]
        is_valid = all({"key", "at", "fields", "kind"} <= event.keys() for event in events)
    except OSError as error:
        raise NoHistory(f"cannot read {path}: {error.strerror}; make it with {_EXPORT}") from None
    except (ValueError, AttributeError):
        is_valid = False
    if not is_valid:
        raise NoHistory(f"{path} does not have one event as JSON per line; make it with {_EXPORT}")
    return events


def _jobs(events: Iterable[dict[str, Any]]) -> Iterable[Job]:
    tasks: dict[TaskId, Task] = {}
    started: dict[TaskId, float] = {}
    ran: dict[TaskId, float] = {}
    checkpointed: set[TaskId] = set()
    for event in events:
        key, at, fields = TaskId(event["key"]), _seconds(event["at"]), event["fields"]
        match event["kind"]:
            case "task.submitted":
                tasks[key] = read_task({name: _plain(name, value) for name, value in fields.items()})
            case "task.started":
                started[key] = at
            case kind if kind in _RUN_ENDS and key in started:
                ran[key] = ran.get(key, 0.0) + at - started.pop(key)
        if fields.get("checkpoint_at") is not None:
            checkpointed.add(key)
    others = [key for key in ran if key in tasks and not is_started_by_agent(tasks[key].holder)]
    if others:
        report(f"left out: {len(others)} external leases and models, whose memory counts as free")
    for key in others:
        del ran[key]
    for key, seconds in ran.items():
        if key in tasks:
            yield Job(_without_absent(tasks[key], ran), max(seconds, 0.001), checkpoints=key in checkpointed)


def _without_absent(task: Task, ran: Container[TaskId]) -> Task:
    """Return the task without its dependencies on tasks that never ran, which are not part of the replay."""
    after = tuple(dependency for dependency in task.after if dependency.task in ran)
    return replace(task, after=after, awaits=bool(after))


def _plain(name: str, value: Any) -> Any:
    """Return a value in the form of rows, which keep times as seconds; the API prints them as RFC 3339."""
    is_instant = name.endswith("_at") or name == "not_before"
    return Instant(_seconds(value)) if is_instant and isinstance(value, str) else value


def _seconds(at: str | float) -> float:
    return (
        at if isinstance(at, int | float) else datetime.fromisoformat(at.replace("Z", "+00:00")).timestamp()
    )
