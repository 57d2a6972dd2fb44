"""The HTML with which notebooks show tasks, GPUs and explanations. All text from the service is escaped."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from gpubroker.wire.devices import Gpu
from gpubroker.wire.explanations import DeviceVerdict, Explanation
from gpubroker.wire.tasks import Task

_MIB_PER_GIB = 1024
_MAX_ROWS = 100
"""The most rows of a table. A notebook keeps all of its outputs."""
_MAX_DEVICES = 24


def html_of_task(task: Task) -> str:
    """Return a table with the main fields of the task; fields that say nothing are left out."""
    resources = task.resources
    waits = task.pending
    fields: Mapping[str, object] = {
        "task": task.id,
        "name": task.name,
        "state": task.raw.get("state", task.state.value),
        "waits": "" if waits is None else f"{waits.reason}: {waits.message}",
        "position": "" if waits is None else waits.position,
        "failed": "" if task.error is None else f"{task.error.kind}: {task.error.message}",
        "node": task.node,
        "GPUs": ", ".join(f"{device.uuid} ({_gib(device.gpu_mb)} GiB)" for device in task.devices),
        "asks for": f"{resources.gpus} x {_gib(resources.gpu_mb)} GiB" if resources.gpu_mb else "",
        "priority": f"{task.priority} ({task.band})",
        "attempt": task.attempt or "",
        "progress": "" if task.progress is None else task.progress.message,
        "submitted": task.submitted_at,
        "started": task.started_at,
        "finished": task.finished_at,
    }
    return _table((), ((name, _text(value)) for name, value in fields.items() if value not in ("", None)))


def html_of_list(items: Sequence[object]) -> str | None:
    """Return a table with a row for each task or GPU; None for other items, and for an empty list."""
    if not items:
        return None
    if all(isinstance(item, Gpu) for item in items):
        return _cut(_GPU_HEAD, [_gpu_row(item) for item in items if isinstance(item, Gpu)])
    if all(isinstance(item, Task) for item in items):
        return _cut(_TASK_HEAD, [_task_row(item) for item in items if isinstance(item, Task)])
    return None


def html_of_explanation(explained: Explanation) -> str:
    """Return the reason, what would help, and a table with the verdict on each device."""
    name = f"{explained.name} ({explained.id})" if explained.name else explained.id
    reason = f"<b>{_text(explained.reason)}</b>: " if explained.reason else ""
    parts = [f"<p><b>{_text(name)}</b>, {_text(explained.raw.get('state', explained.state.value))}</p>"]
    parts.append(f"<p>{reason}{_text(explained.message)}</p>")
    if explained.remedies:
        listed = "".join(f"<li>{_text(remedy.message)}</li>" for remedy in explained.remedies)
        parts.append(f"<p>What would help:</p><ul>{listed}</ul>")
    if explained.devices:
        parts.append(_table(_DEVICE_HEAD, map(_device_row, explained.devices[:_MAX_DEVICES])))
    return "".join(parts)


def html_of_progress(fraction: float, line: str) -> str:
    """Return a progress bar with its line of text. `fraction` is from 0 to 1."""
    return f'<progress max="1" value="{fraction:.4f}"></progress> {_text(line)}'


_TASK_HEAD = ("task", "name", "state", "priority", "node", "submitted")
_GPU_HEAD = ("node", "GPU", "kind", "memory", "leased GiB", "free GiB", "holders")
_DEVICE_HEAD = ("node", "GPU", "kind", "free GiB", "verdict")


def _task_row(task: Task) -> tuple[str, ...]:
    state = task.raw.get("state", task.state.value)
    return tuple(map(_text, (task.id, task.name, state, task.priority, task.node or "", task.submitted_at)))


def _gpu_row(gpu: Gpu) -> tuple[str, ...]:
    holders = ", ".join(f"{holder.name or holder.id or holder.tenant}" for holder in gpu.holders)
    meter = f'<meter max="{gpu.physical_mb}" value="{gpu.leased_mb}"></meter>'
    sizes = (f"{_gib(gpu.leased_mb)} of {_gib(gpu.physical_mb)}", _gib(gpu.free_mb), holders)
    return (*map(_text, (gpu.node, gpu.index, gpu.kind)), meter, *map(_text, sizes))


def _device_row(device: DeviceVerdict) -> tuple[str, ...]:
    free = f"{_gib(device.free_mb)} of {_gib(device.allocatable_mb)}"
    return tuple(map(_text, (device.node, device.index, device.kind, free, device.message)))


def _cut(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    more = f"<p>{len(rows) - _MAX_ROWS} more are not shown</p>" if len(rows) > _MAX_ROWS else ""
    return _table(head, rows[:_MAX_ROWS]) + more


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose cells are HTML."""
    titles = "".join(f"<th>{title}</th>" for title in head)
    lines = ("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    top = f"<thead><tr>{titles}</tr></thead>" if head else ""
    return f"<table>{top}<tbody>{''.join(lines)}</tbody></table>"


def _text(value: object) -> str:
    return escape(str(value))


def _gib(size_mb: int) -> str:
    return f"{size_mb / _MIB_PER_GIB:.1f}"
