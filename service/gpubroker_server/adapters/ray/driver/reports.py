"""Reports from bytes to values. A process that runs user code may have written anything: all is checked."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import structlog

from gpubroker_server.adapters.ray.wire import SPOKEN, unpack
from gpubroker_server.core.domain.device import DeviceSample, Node
from gpubroker_server.core.domain.orders import (
    Checkpointed,
    Ended,
    Ending,
    Failure,
    Gone,
    Heartbeat,
    NodeLost,
    NodeSeen,
    Progressed,
    Ready,
    Report,
    RunId,
    Sampled,
    SeenDevice,
    Started,
)
from gpubroker_server.core.domain.units import Fence, Instant, Mib, NodeName, TaskId, device_key

log = structlog.get_logger("gpubroker.ray")

MALFORMED = "malformed_report"
"""Kind of the failure of a run that told what no report says."""

_OF_A_RUN = frozenset({"started", "ready", "progressed", "checkpointed", "ended"})
_FORMATS = frozenset({"json", "cloudpickle"})
_MOST = 2**31 - 1
"""Counts are columns of four bytes."""
_TEXT_CHARS = 128 * 1024
_NAME_CHARS = 2048
_TAIL_BYTES = 1024 * 1024


class Malformed(ValueError):
    """What was told is no report; the text says which part of it."""


class Told(NamedTuple):
    """By one agent, in one message."""

    node: NodeName
    protocol: int
    reports: list[Report]


@dataclass(frozen=True, slots=True)
class ReportForm:
    """Reads what agents tell, and moves its times from the node's clock to the reader's."""

    cluster: str
    now: Callable[[], float]

    def read(self, data: bytes, asked_seconds_ago: float) -> Told:
        """The node that tells, and its reports in order. Raises ValueError for a form not spoken here.

        What was told is as old as it was when it was sent, and as its way here took: all the time since the
        question that it answers, but for what the question waited at the agent.
        """
        protocol, node, sent_at, held_seconds, reports = unpack(data)
        if protocol not in SPOKEN:
            raise ValueError(f"reports of node {node} have form {protocol}, this service reads {SPOKEN}")
        arrived = self.now() - max(0.0, asked_seconds_ago - held_seconds)
        batch = _Batch(self.cluster, node, sent_at, arrived)
        read = [read for report in reports if (read := _readable(batch, report)) is not None]
        return Told(NodeName(node), protocol, read)


_Run = tuple[TaskId, Fence, Instant]


@dataclass(frozen=True, slots=True)
class _Batch:
    cluster: str
    node: str
    sent_at: float
    """On the node's clock."""
    arrived_at: float
    """The same instant on ours."""

    def instant(self, at: Any) -> Instant:
        """Nothing is younger than the message that tells of it."""
        return Instant(self.arrived_at - max(0.0, self.sent_at - _number(at, "at", least=0.0)))


def _readable(batch: _Batch, report: Any) -> Report | None:
    """A run that tells what cannot be read has failed; anything else that cannot be read is left out."""
    try:
        return _report(batch, report)
    except (ValueError, TypeError) as fault:
        log.error("a node told what is no report", node=batch.node, fault=str(fault))
        match report:
            case (kind, str(task), int(fence), int(rank), *_) if kind in _OF_A_RUN:
                message = f"its process told what is no report: {fault}"
                failure = Failure(MALFORMED, message)
                at = Instant(batch.arrived_at)
                return Ended(TaskId(task), Fence(fence), at, Ending.FAILED, failure=failure, rank=rank)
    return None


def _report(batch: _Batch, report: Any) -> Report:
    match report:
        case (str(kind), task, fence, rank, at, *rest) if kind in _OF_A_RUN or kind == "gone":
            run = TaskId(_name(task, "task")), Fence(_count(fence, "fence")), batch.instant(at)
            return _of_a_run(batch, kind, run, _count(rank, "rank"), rest)
        case ("beat", at):
            return Heartbeat(NodeName(batch.node), batch.instant(at))
        case ("sampled", at, samples):
            when = batch.instant(at)
            return Sampled(NodeName(batch.node), when, _samples(batch, when, samples))
        case ("node_seen", at, described, devices, runs):
            return NodeSeen(
                _node(described),
                tuple(_device(device) for device in _sequence(devices, "devices")),
                tuple(_run_id(run) for run in _sequence(runs, "runs")),
                batch.instant(at),
                _name(described.get("release", ""), "release"),
            )
        case ("node_lost", at, incarnation, why):
            when = batch.instant(at)
            return NodeLost(NodeName(batch.node), _name(incarnation, "incarnation"), when, _text(why, "why"))
        case _:
            return _refuse("report", report)


def _of_a_run(batch: _Batch, kind: str, run: _Run, rank: int, rest: list[Any]) -> Report:
    match kind, rest:
        case "started", [pid]:
            return Started(*run, _count(pid, "pid"), rank)
        case "ready", [address]:
            return Ready(*run, _name(address, "address"), rank)
        case "progressed", [fraction, message]:
            done = None if fraction is None else _number(fraction, "fraction", least=0.0, most=1.0)
            return Progressed(*run, done, _text(message, "message"), rank)
        case "checkpointed", [_, _, _, _]:
            return _checkpointed(run, rank, *rest)
        case "ended", [_, _, _, _, _]:
            return _ended(run, rank, *rest)
        case "gone", [proof, samples]:
            return Gone(*run, _name(proof, "proof"), _samples(batch, run[2], samples), rank)
        case _:
            return _refuse(kind, rest)


def _checkpointed(run: _Run, rank: int, sequence: Any, digest: Any, data: Any, uri: Any) -> Checkpointed:
    if (data is None) == (uri is None):
        raise Malformed("a checkpoint has either data or a uri")
    return Checkpointed(
        *run,
        _count(sequence, "sequence"),
        _name(digest, "digest"),
        None if data is None else _bytes(data, "data"),
        None if uri is None else _name(uri, "uri"),
        rank,
    )


def _ended(run: _Run, rank: int, told: Any, result: Any, form: Any, failure: Any, tail: Any) -> Ended:
    if form not in _FORMATS:
        _refuse("result_format", form)
    ending = Ending(told)
    data = None if result is None and ending is not Ending.SUCCEEDED else _bytes(result, "result")
    return Ended(*run, ending, data, form, _failure(failure), _bytes(tail, "log_tail", _TAIL_BYTES), rank)


def _failure(told: Any) -> Failure | None:
    match told:
        case None:
            return None
        case (kind, message, traceback):
            return Failure(_name(kind, "kind"), _text(message, "message"), _text(traceback, "traceback"))
        case _:
            return _refuse("failure", told)


def _samples(batch: _Batch, at: Instant, told: Any) -> tuple[DeviceSample, ...]:
    return tuple(_sample(batch, at, sample) for sample in _sequence(told, "samples"))


def _sample(batch: _Batch, at: Instant, told: Any) -> DeviceSample:
    match told:
        case (uuid, used, foreign, dict(by_holder), utilization):
            return DeviceSample(
                device_key(batch.cluster, batch.node, _name(uuid, "uuid")),
                at,
                Mib(_count(used, "used_mb")),
                None if foreign is None else Mib(_count(foreign, "foreign_mb")),
                {_name(holder, "holder"): Mib(_count(mb, "by_holder")) for holder, mb in by_holder.items()},
                None if utilization is None else _number(utilization, "utilization"),
            )
        case _:
            return _refuse("sample", told)


def _node(told: Any) -> Node:
    match told:
        case {
            "name": name,
            "cpu": cpu,
            "memory_mb": memory_mb,
            "max_runs": max_runs,
            "incarnation": incarnation,
            "boot_id": boot_id,
        }:
            return Node(
                NodeName(_name(name, "name")),
                _number(cpu, "cpu", least=0.0),
                Mib(_count(memory_mb, "memory_mb")),
                _count(max_runs, "max_runs"),
                _name(incarnation, "incarnation"),
                _name(boot_id, "boot_id"),
            )
        case _:
            return _refuse("node", told)


def _device(told: Any) -> SeenDevice:
    match told:
        case (uuid, kind, index, physical_mb, bool(simulated), str(parent), bool(split)):
            return SeenDevice(
                _name(uuid, "uuid"),
                _name(kind, "kind"),
                _count(index, "index"),
                Mib(_count(physical_mb, "physical_mb")),
                simulated,
                parent,
                split,
            )
        case _:
            return _refuse("device", told)


def _run_id(told: Any) -> RunId:
    match told:
        case (task, fence, rank):
            return TaskId(_name(task, "task")), Fence(_count(fence, "fence")), _count(rank, "rank")
        case _:
            return _refuse("run", told)


def _sequence(value: Any, name: str) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else _refuse(name, value)


def _name(value: Any, name: str) -> str:
    """Text that becomes a column or a key as it is; PostgreSQL takes no NUL there."""
    if isinstance(value, str) and len(value) <= _NAME_CHARS and "\0" not in value:
        return value
    return _refuse(name, value)


def _text(value: Any, name: str) -> str:
    if isinstance(value, str) and len(value) <= _TEXT_CHARS:
        return value
    return _refuse(name, value)


def _count(value: Any, name: str) -> int:
    if type(value) is int and 0 <= value <= _MOST:
        return value
    return _refuse(name, value)


def _number(value: Any, name: str, *, least: float = -math.inf, most: float = math.inf) -> float:
    if type(value) in (int, float) and math.isfinite(value) and least <= value <= most:
        return float(value)
    return _refuse(name, value)


def _bytes(value: Any, name: str, at_most: int | None = None) -> bytes:
    if isinstance(value, bytes) and (at_most is None or len(value) <= at_most):
        return value
    return _refuse(name, value)


def _refuse(name: str, value: Any) -> NoReturn:
    if isinstance(value, str | bytes):
        raise Malformed(f"{name} is {value[:50]!r}, of length {len(value)}")
    shown = repr(value) if isinstance(value, int | float) else f"of type {type(value).__name__}"
    raise Malformed(f"{name} is {shown}")
