"""`gpubroker explain`, and the answer of `submit --dry-run`: why a task waits and what would help."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from gpubroker.cli import EXIT_NOT_NOW, EXIT_OK, EXIT_REFUSED
from gpubroker.cli.lookup import TaskWord, connect, stats_if_known, task_id
from gpubroker.cli.printing import Format, Output, emit
from gpubroker.cli.tables import (
    Column,
    PlainTable,
    duration,
    executor_in_words,
    gib,
    gib_of,
    short_id,
    size,
    with_short_ids,
)
from gpubroker.cli.tasks.events import ATTEMPTS, past_of

if TYPE_CHECKING:
    from gpubroker.broker import Broker
    from gpubroker.wire.explanations import (
        DeviceHolder,
        DeviceVerdict,
        Explanation,
        MemoryHolder,
        Preemption,
        Quota,
        RankVerdict,
        Remedy,
        Simulation,
    )
    from gpubroker.wire.forecasts import Expected, ForecastsKept

_MAX_DEVICES = 24
"""The most devices in the table, those that have room soonest; `-o json` has all devices."""
_MAX_HOLDERS = 5
_FEWEST_FORECASTS = 5
"""A record of fewer forecasts says nothing about the next one."""
_PRINTING = frozenset({"entrypoint", "command", "function"})
"""The kinds of tasks whose runs have a log."""
_WIDE = 110
_COLUMNS = (
    Column("GPU", share=0.3),
    Column("FREE GiB"),
    Column("ENOUGH IN"),
    Column("HOLDERS", from_width=_WIDE, share=0.4, wraps=True),
    Column("VERDICT", from_width=_WIDE, wraps=True),
    Column("VERDICT, AND WHAT HOLDS IT", until_width=_WIDE, wraps=True),
)
_WOULD = {
    "starts": "would start now",
    "preempts": "would start after a preemption",
    "refused": "would be refused",
}
_EXIT_CODES = {"starts": EXIT_OK, "preempts": EXIT_OK, "refused": EXIT_REFUSED}


def explain(task: TaskWord, output: Output = Format.TABLE) -> None:
    """Explain why a task waits and what would help, or where it runs, or how it ended."""
    with connect() as broker:
        found = broker.explain(task_id(broker, task))
        emit(output, found, lambda found: _explanation(found, _background(broker, found)))


def _background(broker: Broker, explained: Explanation) -> Iterator[str]:
    """Yield hints: where the whole error is, which task preempted this one, and whether the cluster can run
    tasks."""
    found = broker.get(explained.worker or explained.id, worker=explained.worker)
    if found.error and found.is_finished:
        yield f"details: gpubroker show {short_id(found.id)}"
    yield from (f"{name} {line}" for name, line in past_of(broker, found).items() if name != ATTEMPTS)
    if not found.is_finished and found.run.kind in _PRINTING:
        worker = f" --worker {short_id(explained.worker)}" if explained.worker else ""
        yield f"to follow it: gpubroker logs -f {short_id(found.id)}{worker}"
    if explained.reason == "BackendUnavailable" and (stats := stats_if_known(broker)):
        yield f"executor: {executor_in_words(stats.executor)}"


def show_simulation(simulation: Simulation, output: Format) -> NoReturn:
    """Print the outcome of a simulation, and exit with its code."""
    emit(output, simulation, _simulation)
    raise typer.Exit(_EXIT_CODES.get(simulation.verdict, EXIT_NOT_NOW))


def _explanation(explained: Explanation, background: Iterable[str]) -> RenderableType:
    reason = (f"{explained.reason}: ", "bold") if explained.reason else ""
    task = f"{explained.name} ({short_id(explained.id)})" if explained.name else short_id(explained.id)
    parts: list[RenderableType] = [
        Text(f"{task}, {explained.raw.get('state', '')}", style="bold"),
        Text.assemble(reason, with_short_ids(explained.message)),
    ]
    parts += _place(explained)
    parts += _quota(explained.quota)
    further = (f"also {blocker.reason}: {blocker.message}" for blocker in explained.blockers[1:])
    parts += [Text(with_short_ids(line)) for line in (*further, *background)]
    parts += _preemption(explained.preemption)
    parts += _remedies(explained.remedies, explained.id)
    return Group(*parts, *_ranks(explained.ranks), *_devices(explained.devices))


def _simulation(simulation: Simulation) -> RenderableType:
    waits = f"would wait ({simulation.reason})" if simulation.reason else "would wait"
    verdict = _WOULD.get(simulation.verdict, waits)
    more = simulation.message.removeprefix(f"it {verdict}")  # the verdict is already printed
    colon = ": " if more == simulation.message else ""
    parts: list[RenderableType] = [Text.assemble((verdict, "bold"), f"{colon}{with_short_ids(more)}")]
    if simulation.sizing:
        parts.append(Text(f"  {simulation.sizing.message}"))
    if simulation.verdict == "refused":
        return Group(*parts, *_remedies(simulation.remedies))
    if simulation.verdict == "waits":
        parts += _place(simulation)
    parts += _quota(simulation.quota)
    parts += [Text(f"  preempts {run_in_words(run)}") for run in simulation.victims]
    if simulation.verdict == "waits":
        parts += [*_preemption(simulation.preemption), *_remedies(simulation.remedies)]
        parts += [*_ranks(simulation.ranks), *_devices(simulation.devices)]
    return Group(*parts)


def _place(explained: Explanation | Simulation) -> Iterator[Text]:
    """Yield the task's place in the queue, and its expected start."""
    parts = []
    if explained.position:
        length = max(explained.queue_length, explained.position)
        parts.append(f"position {explained.position} of {length} in the queue")
    if inherited := getattr(explained, "inherits", None):
        parts.append(f"inherits priority {inherited.priority} from {short_id(inherited.task)}")
    if explained.start and explained.start.p50_seconds:
        parts.append(f"room expected {_within(explained.start)}{_record(explained.start_record)}")
    if parts:
        yield Text("; ".join(parts))


def _record(record: ForecastsKept | None) -> str:
    if record is None or record.n < _FEWEST_FORECASTS:
        return ""
    error = duration(record.median_error_seconds)
    return f"; half of the last {record.n} such forecasts were off by less than {error}"


def _quota(quota: Quota | None) -> Iterator[Text]:
    if quota is None:
        return
    lent_text = f", and {quota.cohort} lends {gib(quota.lent_mb)} more" if quota.cohort else ""
    yield Text(
        f"quota of {quota.tenant}: {gib_of(quota.used_mb, quota.guaranteed_mb, ' of ', ' GiB')} used"
        f"{lent_text}; this task counts {gib_of(quota.counts_mb, quota.left_mb, ', ')} left"
    )


def _ranks(found: Sequence[RankVerdict] | None) -> Iterator[RenderableType]:
    """Yield the verdicts on ranks. Equal neighbours share a line."""
    if not found:
        return
    yield Text()
    yield Text("Ranks", style="bold")
    for line, equal in groupby(found, key=_rank_in_words):
        numbers = [rank.rank for rank in equal]
        numbers_text = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
        yield Text(f"  {numbers_text:>5}  {with_short_ids(line)}")


def _rank_in_words(verdict: RankVerdict) -> str:
    if verdict.place is None:
        return verdict.message
    indexes = ",".join(str(device.index) for device in verdict.place.devices)
    return f"fits on {verdict.place.node}{f'/gpu{indexes}' if indexes else ''}"


def _within(expected: Expected) -> str:
    """Return `in about 30s`, and how certain that is."""
    if expected.p50_seconds <= 0 and expected.p90_seconds <= 0:
        return "now"
    if not expected.n:
        return f"in about {duration(expected.p50_seconds)}"
    p50, p90 = duration(expected.p50_seconds), duration(expected.p90_seconds)
    runs = "1 similar run" if expected.n == 1 else f"{expected.n} similar runs"
    return f"in about {p50} (90% within {p90}; from {runs})"


def _preemption(found: Preemption | None) -> Iterator[Text]:
    if found is None or found.why in ("not_needed", "under_way"):
        return
    yield Text(found.message)
    for run in found.runs[:3]:
        if run.shield == "none":
            yield Text(f"  {run_in_words(run)}, {duration(run.lost_gpu_seconds)} of GPU work lost")


def run_in_words(run: MemoryHolder) -> str:
    return f"{_name_of(run)} {size(run.gpu_mb)} (priority {run.priority})"


def _remedies(found: Sequence[Remedy], task: str = "") -> Iterator[Text]:
    """Yield the remedies as text. `task` is the id of a task that is submitted already; some of its remedies
    are shown as a command."""
    if not found:
        return
    yield Text()
    yield Text("What would help", style="bold")
    for remedy in found:
        yield Text(f"  {with_short_ids(remedy.message)}")
        if remedy.victims:
            yield Text(f"      preempts {', '.join(map(run_in_words, remedy.victims))}", style="dim")
        if words := _command(remedy.change, task):
            yield Text(f"      {words}", style="dim")


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
    parts = [f"with {' '.join(given)}"] if given else []
    parts += [f"without {', '.join(without)}"] if without else []
    return f"submit {' and '.join(parts)}" if parts else ""


def _devices(found: Sequence[DeviceVerdict]) -> Iterator[RenderableType]:
    if not found:
        return
    nearest = sorted(found, key=_nearness)[:_MAX_DEVICES]
    shown = [device for device in found if device in nearest] if len(found) > _MAX_DEVICES else found
    rows = []
    for (node, kind, *facts), equal in groupby(shown, key=_device_facts):
        indexes = [device.index for device in equal]
        index_text = f"{indexes[0]}" if len(indexes) == 1 else ",".join(map(str, indexes))
        rows.append((f"{node} {index_text} {kind}", *facts))
    yield Text()
    yield PlainTable(_COLUMNS, rows)
    if len(found) > len(shown):
        yield Text(f"{len(found) - len(shown)} more devices are not shown; -o json has all", style="dim")


def _device_facts(device: DeviceVerdict) -> tuple[str, ...]:
    """Return the facts of a device. Devices of a node whose facts are equal share a row."""
    holders, message = _holders(device.holders), with_short_ids(device.message)
    return (
        device.node,
        device.kind,
        gib_of(device.free_mb, device.allocatable_mb),
        "" if device.free_in is None else _short(device.free_in),
        holders,
        message,
        f"{message}\n{holders}" if holders else message,
    )


def _nearness(device: DeviceVerdict) -> tuple[float, int, str]:
    free_in_seconds = device.free_in.p50_seconds if device.free_in else float("inf")
    return free_in_seconds, (device.need_mb or 2**40) - device.free_mb, device.key


def _short(free_in: Expected) -> str:
    if free_in.p90_seconds <= 0:
        return "now"
    p50, p90 = duration(free_in.p50_seconds), duration(free_in.p90_seconds)
    return p50 if p50 == p90 else f"{p50}-{p90}"


def _holders(holders: Sequence[DeviceHolder]) -> str:
    """Return the largest holders, one per line, since all in one line would be wider than a terminal."""
    largest = sorted(holders, key=lambda holder: -holder.gpu_mb)[:_MAX_HOLDERS]
    more = [f"and {len(holders) - len(largest)} more"] if len(holders) > len(largest) else []
    return "\n".join([*map(_holder, largest), *more])


def _holder(holder: DeviceHolder) -> str:
    ends = f", {_short(holder.ends)} left" if holder.ends and holder.ends.p90_seconds > 0 else ""
    leaving = ", stopping" if holder.stopping else ", in quarantine" if holder.quarantine else ""
    return f"{_name_of(holder)} {size(holder.gpu_mb)} (priority {holder.priority}{leaving}{ends})"


def _name_of(holder: MemoryHolder) -> str:
    """Return the name of a holder, or else the end of its id; another tenant's holder has neither."""
    return holder.name or short_id(holder.id or "")
