"""One line per event: its kind, whom it is about, and what is new in words. `-o json` has all of it."""

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from gpubroker.cli.layout import short_id, size
from gpubroker.tasks.task import Event

_KIND_CELLS = 16


def retold(event: Event) -> Text:
    at = f"{event.at:%H:%M:%S}" if event.at else ""
    subject, place = _subject(event)
    facts = ", ".join(fact for fact in (place, *_facts(event)) if fact)
    if not facts and event.kind.endswith(".changed"):
        facts = ", ".join(event.fields)
    return Text.assemble(
        (f"{event.position:>6} {at} ", "dim"),
        (f"{event.kind:<{_KIND_CELLS}} ", "bold"),
        f"{subject}  {facts}",
    )


def _subject(event: Event) -> tuple[str, str]:
    """Whom an event is about, and on which device; of leases and pledges both are in the key."""
    match event.kind.partition(".")[0], event.key.split(":"):
        case "task", _:
            return short_id(event.key), ""
        case "lease", [_, holder, _, _, device]:
            return short_id(holder), _on(device)
        case "pledge", [preemptor, device]:
            return short_id(preemptor), _on(device)
        case "request", _:
            return short_id(event.fields.get("task")), ""
        case "device", _:
            return event.key.rpartition("/")[2], ""
        case _:
            return event.key, ""


def _on(device: str) -> str:
    return f"on {device.rpartition('/')[2]}"


def _facts(event: Event) -> Iterator[str]:
    if event.kind.startswith("pledge.") and event.kind != "pledge.made":
        return  # the same fields as when it was made
    for name, value in event.fields.items():
        if value is not None and (word := _fact(name, value)):
            yield word


def _fact(name: str, value: Any) -> str:
    """What a field says to a person; nothing if it repeats what is there or is for programs."""
    match name:
        case "name" | "stop_reason" | "reason" | "what" | "kind" | "proof" | "by":
            return str(value)
        case "priority" | "preemptions" | "failures" | "cpu" | "index":
            return f"{name} {value}"
        case "mb" | "gpu_mb" | "physical_mb":
            return size(value)
        case "overused_mb":
            return f"used {size(value)}" if value else ""
        case "values":
            return ", ".join(_learned(*lesson) for lesson in value)
        case "node":
            return f"on {value}"
        case "freeing_for":
            return f"for {short_id(value)}"
        case "demand" | "fields":
            return ", ".join(word for part, inner in value.items() if (word := _fact(part, inner)))
        case "ready":
            return "answers" if value else "does not answer"
        case "awaits":
            return "" if value else "awaits no other task any more"
        case "failed_by":
            return f"because of {short_id(value)}"
        case "after":
            return f"after {', '.join(short_id(task) for task, _ in value)}"
        case "held":
            return "held" if value else "released"
        case "gpus" if value > 1:
            return f"{value} GPUs"
        case "stop_deadline_at" | "checkpoint_at" | "not_before" | "deadline_at" | "expires_at":
            words = {"checkpoint_at": "saved at", "not_before": "not before", "expires_at": "waits until"}
            return f"{words.get(name, 'at the latest')} {str(value)[11:19]}"
        case _:
            return ""


def _learned(kind: str, what: str, value: float | None) -> str:
    """What a run took, on which kind of device; without a value it was forgotten."""
    took = "" if value is None else size(value) if what == "gpu_mb" else f"{value:g} s"
    return " ".join(word for word in (took or what, f"on {kind}" if kind else "") if word)
