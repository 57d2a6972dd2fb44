"""Why a task waits, whom it would displace and what would help, for people."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from gpubroker.cli.layout import Column, Rows, gib, short_id, size, span, with_short_ids
from gpubroker.cluster.fleet import ForecastsKept
from gpubroker.tasks.estimates import Expected
from gpubroker.tasks.explanation import (
    DeviceVerdict,
    Explanation,
    Preemption,
    Quota,
    RankVerdict,
    Remedy,
    Run,
    Simulation,
)

MOST_DEVICES = 24
"""So many devices are drawn, those that come nearest; `-o json` has all."""

MOST_HOLDERS = 5
"""So many are drawn of each."""

_COLUMNS = (
    Column("GPU", share=0.25),
    Column("FREE GiB"),
    Column("ENOUGH IN"),
    Column("HOLDERS", from_width=80, share=0.4, wraps=True),
    Column("VERDICT", wraps=True),
)


def explanation(explained: Explanation, more: Iterable[str] = ()) -> RenderableType:
    """The sentence; `more` to be said of the task; what else is in the way; what would help; each device."""
    because = (f"{explained.reason}: ", "bold") if explained.reason else ""
    parts: list[RenderableType] = [Text.assemble(because, with_short_ids(explained.message))]
    if place := _place(explained):
        parts.append(Text(place))
    parts += _quota(explained.quota)
    also = (f"also {blocker.reason}: {blocker.message}" for blocker in explained.blockers[1:])
    parts += [Text(with_short_ids(line)) for line in (*also, *more)]
    if explained.preemption:
        parts += preemption(explained.preemption)
    parts += remedies(explained.remedies, explained.id)
    parts += [*ranks(explained.ranks), *devices(explained.devices)]
    return Group(*parts)


_WOULD = {
    "starts": "would start now",
    "preempts": "would start after a preemption",
    "refused": "would be refused",
}


def simulation(told: Simulation) -> RenderableType:
    """What would become of a task."""
    verdict = _WOULD.get(told.verdict, f"would wait ({told.reason})" if told.reason else "would wait")
    more = told.message.removeprefix(f"it {verdict}")  # what it says itself is not said twice
    colon = ": " if more == told.message else ""
    parts: list[RenderableType] = [Text.assemble((verdict, "bold"), f"{colon}{with_short_ids(more)}")]
    if told.verdict == "refused":
        return Group(*parts, *remedies(told.remedies))
    if told.verdict == "waits" and (place := _place(told)):
        parts.append(Text(place))
    parts += _quota(told.quota)
    parts += [Text(f"  stops {run_in_words(run)}") for run in told.victims]
    if told.verdict == "waits":
        if told.preemption:
            parts += preemption(told.preemption)
        parts += [*remedies(told.remedies), *ranks(told.ranks), *devices(told.devices)]
    return Group(*parts)


def _place(explained: Explanation | Simulation) -> str:
    said = []
    if explained.position:
        length = max(explained.queue_length, explained.position)
        said.append(f"position {explained.position} of {length} in the queue")
    if isinstance(explained, Explanation) and explained.inherits:
        said.append(
            f"inherits priority {explained.inherits.priority} from {short_id(explained.inherits.task)}"
        )
    if explained.start and explained.start.p50_seconds:
        said.append(f"room expected {within(explained.start)}{_record(explained.start_record)}")
    return "; ".join(said)


def _record(record: ForecastsKept | None) -> str:
    if record is None:
        return ""
    return f"; of {record.n} foretold like this one in two was within {span(record.median_error_seconds)}"


def _quota(quota: Quota | None) -> Iterator[RenderableType]:
    if quota is None:
        return
    lent = f", and {quota.cohort} lends it {gib(quota.lent_mb)} more" if quota.cohort else ""
    yield Text(
        f"quota of {quota.tenant}: {gib(quota.used_mb)} of {gib(quota.guaranteed_mb)} GiB are used{lent}; "
        f"this counts {gib(quota.counts_mb)} and {gib(quota.left_mb)} are left"
    )


def ranks(found: Sequence[RankVerdict]) -> Iterator[RenderableType]:
    """Alike neighbours in one line."""
    if not found:
        return
    yield Text()
    yield Text("Ranks", style="bold")
    for (where, message), alike in groupby(found, key=_rank_in_words):
        numbers = [one.rank for one in alike]
        which = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
        yield Text(f"  {which:>5}  {with_short_ids(where or message)}")


def _rank_in_words(one: RankVerdict) -> tuple[str, str]:
    """Where it fits, or why not."""
    if one.place is None:
        return "", one.message
    indexes = ",".join(str(device["index"]) for device in one.place["devices"])
    return f"fits on {one.place['node']}{f'/gpu{indexes}' if indexes else ''}", ""


def within(expected: Expected) -> str:
    """`in about 30s`, and how sure that is."""
    if expected.p50_seconds <= 0 and expected.p90_seconds <= 0:
        return "now"
    if not expected.n:
        return f"in about {span(expected.p50_seconds)}"
    runs = "1 run" if expected.n == 1 else f"{expected.n} runs"
    return (
        f"in about {span(expected.p50_seconds)} "
        f"(9 of 10: {span(expected.p90_seconds)}; from {runs} like those)"
    )


def preemption(told: Preemption) -> Iterator[RenderableType]:
    if told.why in ("not_needed", "under_way"):
        return
    yield Text(told.message)
    for run in told.runs[:3]:
        if run.shield == "none":
            yield Text(f"  {run_in_words(run)}, {span(run.lost_gpu_seconds)} of GPU work lost")


def run_in_words(run: Run) -> str:
    who = run.name or short_id(run.id)
    return f"{who} {size(run.gpu_mb)} (priority {run.priority})"


def remedies(found: Sequence[Remedy], task: str = "") -> Iterator[RenderableType]:
    """`task`: its id if it is submitted already; then some of them are a command."""
    if not found:
        return
    yield Text()
    yield Text("What would help", style="bold")
    for remedy in found:
        yield Text(f"  {with_short_ids(remedy.message)}")
        for line in _lines(remedy, task):
            yield Text(f"      {line}", style="dim")


def _lines(remedy: Remedy, task: str) -> Iterator[str]:
    if remedy.victims:
        yield f"stops {', '.join(map(run_in_words, remedy.victims))}"
    if words := _command(remedy.change, task):
        yield words


_OPTIONS = {
    "gpu_mb": "--gpu-memory {}MiB",
    "gpus": "--gpus {}",
    "cpu": "--cpu {:g}",
    "memory_mb": "--memory {}MiB",
    "priority": "--priority {}",
    "expected_seconds": "--expected {:g}s",
    "strategy": "--strategy {}",
    "min_ranks": "--min-ranks {}",
    "kinds": "--kind {0[0]!r}",
}
_WITHOUT = {
    "kinds": "--kind",
    "min_power": "--min-power",
    "min_device_mb": "--min-device-memory",
    "nodes": "--on",
    "pool": "--pool",
    "gpu_fraction": "--gpu-fraction",
    "exclusive": "--exclusive",
    "not_before": "--not-before",
}


def _command(change: Mapping[str, Any], task: str) -> str:
    if task and change.keys() == {"priority"}:
        return f"gpubroker priority {short_id(task)} {change['priority']}"
    if task and change.keys() == {"held"}:
        return f"gpubroker release {short_id(task)}"
    given = [_OPTIONS[name].format(value) for name, value in change.items() if value and name in _OPTIONS]
    without = [_WITHOUT[name] for name, value in change.items() if not value and name in _WITHOUT]
    said = [f"submit with {' '.join(given)}"] if given else []
    said += [f"without {', '.join(without)}"] if without else []
    if not said:
        return ""
    return " and ".join(said) if given else f"submit {said[0]}"


def devices(found: Sequence[DeviceVerdict]) -> Iterator[RenderableType]:
    if not found:
        return
    nearest = sorted(found, key=_nearness)[:MOST_DEVICES]
    shown = [device for device in found if device in nearest] if len(found) > MOST_DEVICES else found
    rows = [
        (
            f"{device.node} {device.index} {device.kind}",
            f"{gib(device.free_mb)}/{gib(device.allocatable_mb)}",
            "" if device.free_in is None else _short(device.free_in),
            _holders(device.holders),
            with_short_ids(device.message),
        )
        for device in shown
    ]
    yield Text()
    yield Rows(_COLUMNS, rows)
    if len(found) > len(shown):
        yield Text(
            f"and {len(found) - len(shown)} more that are further from it; -o json has all", style="dim"
        )


def _nearness(device: DeviceVerdict) -> tuple[float, int, str]:
    soon = device.free_in.p50_seconds if device.free_in else float("inf")
    return soon, (device.need_mb or 2**40) - device.free_mb, device.key


def _short(free_in: Expected) -> str:
    if free_in.p90_seconds <= 0:
        return "now"
    if span(free_in.p50_seconds) == span(free_in.p90_seconds):
        return span(free_in.p50_seconds)
    return f"{span(free_in.p50_seconds)}-{span(free_in.p90_seconds)}"


def _holders(holders: Sequence[Run]) -> str:
    """A line for each: all in one would be wider than a terminal. The largest first."""
    largest = sorted(holders, key=lambda holder: -holder.gpu_mb)[:MOST_HOLDERS]
    more = [f"and {len(holders) - len(largest)} more"] if len(holders) > len(largest) else []
    return "\n".join([*map(_holder, largest), *more])


def _holder(holder: Run) -> str:
    ends = f", {_short(holder.ends)} left" if holder.ends and holder.ends.p90_seconds > 0 else ""
    leaving = ", stopping" if holder.stopping else ", in quarantine" if holder.quarantine else ""
    who = holder.name or short_id(holder.id)
    return f"{who} {size(holder.gpu_mb)} (priority {holder.priority}{leaving}{ends})"
