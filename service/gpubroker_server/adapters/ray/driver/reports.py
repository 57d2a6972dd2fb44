"""Turns the bytes of reports into values. A process with user code may have written anything, so all is
checked."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple, Union

import msgspec
import structlog
from gpubroker.runtime.messages import ENDED_WELL
from msgspec import Meta, Struct, defstruct
from msgspec.structs import astuple, replace

from gpubroker_server.adapters.ray.wire import SPOKEN, unpack
from gpubroker_server.core.domain import device
from gpubroker_server.core.domain.environment import EnvironmentState, NodeEnvironment
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import (
    MOST_HELD,
    Checkpointed,
    Ended,
    Ending,
    EnvironmentReported,
    Failure,
    Gone,
    Heartbeat,
    ItemRange,
    ItemResult,
    ItemsReported,
    Loaded,
    Logged,
    NodeLost,
    NodeReport,
    Progressed,
    Ready,
    Report,
    ReportedDevice,
    Sampled,
    Stacked,
    Started,
)
from gpubroker_server.core.domain.units import Fence, Instant, Mib, NodeName, TaskId, device_key
from gpubroker_server.ports.task_objects import ObjectPart, ObjectQuestion, ObjectWanted, OutputPart

log = structlog.get_logger("gpubroker.ray")

MALFORMED = "malformed_report"
"""The kind of the failure of a run whose process wrote something that is no report."""

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""An integer that fits into a database column of four bytes."""
Position = Annotated[int, Meta(ge=0, le=2**62)]
"""The offset of a byte in a log or an object."""
Name = Annotated[str, Meta(max_length=2048, pattern=r"^[^\x00]*\Z")]
"""A text that fits into a column or a key. PostgreSQL accepts no NUL there."""
Text = Annotated[str, Meta(max_length=128 * 1024)]
Time = Annotated[float, Meta(ge=0.0)]
Number = Annotated[float, Meta(ge=0.0, le=1e6)]
"""A finite number."""
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
LogTail = Annotated[bytes, Meta(max_length=1024 * 1024)]


class MalformedReport(ValueError):
    """A report cannot be read. The message says which part of it."""


class AgentReports(NamedTuple):
    """One message of one agent."""

    node: NodeName
    protocol: int
    reports: list[Report | ObjectQuestion]
    ahead_seconds: float
    """The seconds by which the node's clock is ahead of the reader's. The value is never too small, and too
    large by at most the time that the message and its question were on the way."""


class ReportReader:
    """Reads the messages of agents, and converts their times from the node's clock to the reader's."""

    def __init__(self, cluster: str, now: Callable[[], float]) -> None:
        self._cluster = cluster
        self._now = now

    def read(self, data: bytes, asked_seconds_ago: float) -> AgentReports:
        """Read a message of an agent. Raises ValueError for a protocol that this release does not read. The
        age of the message is taken to be the time since the question that it answers, less the time for
        which the question waited at the agent."""
        protocol, node, sent_at, held_seconds, reports = _MESSAGE.decode(data)
        if protocol not in SPOKEN:
            raise ValueError(f"reports of node {node} have form {protocol}, this service reads {SPOKEN}")
        arrived_at = self._now() - max(0.0, asked_seconds_ago - held_seconds)
        source = Source(self._cluster, NodeName(node), sent_at, arrived_at)
        values = [value for report in reports if (value := _read(source, report)) is not None]
        return AgentReports(source.node, protocol, values, sent_at - arrived_at)


class Source(NamedTuple):
    cluster: str
    node: NodeName
    sent_at: float
    """The time of the message on the node's clock."""
    arrived_at: float
    """The same instant on the reader's clock."""

    def instant(self, at: float) -> Instant:
        """Return the time of a report, which is never later than that of its message."""
        return Instant(self.arrived_at - max(0.0, self.sent_at - at))


Sample = tuple[Name, Count, Count | None, dict[Name, Count], Number | None]
"""(UUID, used MiB, foreign MiB or None, MiB by holder, utilization or None)"""


class Form(Struct, array_like=True, forbid_unknown_fields=True):
    """A report as an agent writes it: its kind, then these fields in their order."""


class HealthForm(Struct, array_like=True, forbid_unknown_fields=True):
    """A GpuHealth. Agents before TELLS_GPU_STATE leave out what has a default."""

    power_watts: Number | None
    temperature_celsius: Number | None
    sm_clock_mhz: Count | None
    memory_clock_mhz: Count | None
    ecc_errors: Position | None
    xid: Position | None
    fatal_xid: Position | None = None
    remap_pending: bool | None = None
    recovery: Name | None = None


EnvironmentParts = tuple[Name, EnvironmentState, Time, Name, Name, Text]
"""(key, state, since, step, python, message)"""


class NodeReportForm(Form):
    at: Time


class RunForm(Form):
    task: Name
    fence: Count
    rank: Count
    at: Time


class NodeForm(Struct):
    name: Name
    cpu: Number
    memory_mb: Count
    max_runs: Count
    incarnation: Name
    boot_id: Name
    release: Name
    faults: dict[Name, Text] = {}
    complete: bool = True
    versions: dict[Name, Name] = {}
    gpu_absence: Text = ""
    environments: tuple[EnvironmentParts, ...] = ()


class NodeSeenForm(NodeReportForm, tag="node_seen"):
    """A NodeReport. The fields of its node and some of the report itself are written as one NodeForm."""

    node: NodeForm
    devices: tuple[tuple[Name, Name, Count, Count, bool, Name, bool], ...]
    """(UUID, kind, index, physical MiB, simulated, UUID of the GPU that it is a part of, split)"""
    runs: tuple[tuple[Name, Count, Count], ...]


def _held(_source: Source, ranges: tuple[ItemRange, ...]) -> tuple[ItemRange, ...]:
    """Return the ranges after checking them. Their number of items is bounded, because the leader examines
    each."""
    last = count = 0
    for first, end in ranges:
        if not last <= first < end:
            raise MalformedReport("the items that a worker holds are ranges in ascending order, none twice")
        last, count = end, count + end - first
    if count > MOST_HELD:
        raise MalformedReport(f"a worker holds at most {MOST_HELD} items, this one says {count}")
    return ranges


def _proof(_source: Source, text: str) -> Proof:
    try:
        return Proof(text)
    except ValueError:
        raise MalformedReport(f"{text[:50]!r} proves nothing that this release knows") from None


def _failure(_source: Source, parts: tuple[str, str, str] | None) -> Failure | None:
    return None if parts is None else Failure(*parts)


def _results(source: Source, items: tuple[Any, ...]) -> tuple[ItemResult, ...]:
    return tuple(
        ItemResult(number, seconds, tries, result, _failure(source, failure))
        for number, seconds, tries, result, failure in items
    )


def _samples(
    source: Source, samples: tuple[Sample, ...], measured_at: Instant
) -> tuple[device.DeviceSample, ...]:
    return tuple(
        device.DeviceSample(
            device_key(source.cluster, source.node, uuid),
            measured_at,
            Mib(used_mb),
            None if foreign_mb is None else Mib(foreign_mb),
            {holder: Mib(mb) for holder, mb in by_holder.items()},
            utilization,
        )
        for uuid, used_mb, foreign_mb, by_holder, utilization in samples
    )


_MADE: Mapping[str, Callable[[Source, Any], Any]] = {
    "ordered_at": lambda source, at: None if at is None else source.instant(at),
    "proof": _proof,
    "failure": _failure,
    "results": _results,
    "held": _held,
    "disks": lambda _source, disks: tuple(device.DiskSample(*disk) for disk in disks),
    "store": lambda _source, store: None if store is None else device.StoreSample(*store),
    "gpus": lambda _source, gpus: {uuid: device.GpuHealth(*astuple(it)) for uuid, it in gpus.items()},
}
"""For each field whose type differs between a form and its value, the function that converts the field."""


class FormReading(NamedTuple):
    """Describes how a form is converted into a value."""

    kind: Callable[..., Any]
    values: Callable[[Any], Any]
    """Returns the fields of a form in the order in which the value takes them."""
    at: int
    """The index of the time among these fields."""
    made: tuple[tuple[int, Callable[[Source, Any], Any]], ...]
    """The indexes of the fields that are converted, each with the function that converts it."""
    samples: int | None
    """The index of the samples; None if the form has none."""


READINGS: dict[type[Struct], FormReading] = {}
"""The readings of all forms but NodeSeenForm, which contains the fields of two values."""


def _getter(names: list[str]) -> Callable[[Any], Any]:
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda form: (get(form),)


def _form(base: type[Form], tag: str, kind: type[Struct], **limits: Any) -> None:
    """Add a form to READINGS. `limits` maps the fields, in the order in which they are written, to their
    types; a pair is the type and the default of a field that some agents leave out."""
    added = [(name, *limit) if type(limit) is tuple else (name, limit) for name, limit in limits.items()]
    form = defstruct(tag, added, bases=(base,), tag=tag, array_like=True, forbid_unknown_fields=True)
    names = [name for name in kind.__struct_fields__ if name in form.__struct_fields__]
    first_fields = kind.__struct_fields__[base is NodeReportForm :][: len(names)]
    assert tuple(names) == first_fields, f"{tag} does not have the first fields of {kind}"
    made = tuple((names.index(name), make) for name, make in _MADE.items() if name in names)
    samples = names.index("samples") if "samples" in names else None
    READINGS[form] = FormReading(kind, _getter(names), names.index("at"), made, samples)


Data = bytes | None
FailureParts = tuple[Name, Text, Text] | None
"""(kind, message, traceback)"""
Item = tuple[Count, Number, Count, Data, FailureParts]
"""(number, seconds, tries, result, failure)"""
Samples = tuple[Sample, ...]
Disk = tuple[Name, Position, Position]
"""(path, total bytes, free bytes)"""
Store = tuple[Count, Count | None]
"""(total MiB, spilled MiB)"""
Reason = tuple[Name, Count]
Range = tuple[Count, Count]

_form(NodeReportForm, "beat", Heartbeat)
_form(NodeReportForm, "sampled", Sampled, samples=Samples)
_form(
    NodeReportForm, "node_sampled", device.NodeSample, cpu=Share, memory_total_mb=Count,
    memory_available_mb=Count, memory_pressure=Share | None,
    disks=tuple[Disk, ...], received_bytes=Position, sent_bytes=Position,
    store=Store | None, gpus=dict[Name, HealthForm], network=Share | None,
    unreached=tuple[device.UnreachedNode, ...],
)  # fmt: skip
_form(
    NodeReportForm, "disk", device.DiskReport, request=Name, files=tuple[device.FoundFile, ...],
    kept=tuple[Reason, ...], is_first=bool, message=Text,
)  # fmt: skip
_form(
    NodeReportForm, "environment", EnvironmentReported, key=Name, state=EnvironmentState | None, step=Name,
    python=Name, message=Text,
)  # fmt: skip
_form(NodeReportForm, "node_lost", NodeLost, incarnation=Name, why=Text)
_form(RunForm, "started", Started, pid=Count, ordered_at=(Time | None, None))
_form(RunForm, "ready", Ready, address=Name)
_form(RunForm, "progressed", Progressed, fraction=Share | None, message=Text)
_form(RunForm, "loaded", Loaded, running=Count, waiting=Count, cpu_percent=Number, answered=Count)
_form(RunForm, "checkpointed", Checkpointed, sequence=Count, digest=Name, data=Data, uri=Name | None)
_form(
    RunForm, "items", ItemsReported, number=Count, results=tuple[Item, ...], held=tuple[Range, ...],
    wanted=Count,
)  # fmt: skip
_form(
    RunForm, "ended", Ended, ending=Ending, result=Data,
    result_format=Literal["json", "cloudpickle", "object"], failure=FailureParts, log_tail=LogTail,
    is_unproven=(bool, True),
)  # fmt: skip
_form(RunForm, "stack", Stacked, request=Name, stack=Text, message=Text)
_form(RunForm, "wanted", ObjectWanted, object=Name, first_byte=Position)
_form(RunForm, "part", ObjectPart, object=Name, size_bytes=Position, first_byte=Position, data=bytes)
_form(
    RunForm, "output", OutputPart, object=Name, size_bytes=Position, first_byte=Position, data=bytes,
    files=Count, message=Text, node=Name,
)  # fmt: skip
_form(
    RunForm, "logged", Logged, stream=Literal["stdout", "stderr", "setup"], first_byte=Position, data=bytes,
    is_final=bool,
)  # fmt: skip
_form(RunForm, "gone", Gone, proof=Name, samples=Samples)

_MESSAGE = msgspec.msgpack.Decoder(tuple[int, str, float, float, tuple[msgspec.Raw, ...]])
_REPORT: msgspec.msgpack.Decoder[Form] = msgspec.msgpack.Decoder(Union[NodeSeenForm, *READINGS])
_BY_USER_CODE = frozenset(
    {"started", "ready", "progressed", "loaded", "checkpointed", "items", "part", "ended"}
)
"""The kinds of reports that are written in processes with user code."""


def _read(source: Source, packed: msgspec.Raw) -> Report | ObjectQuestion | None:
    """Return one report as a value. A report of a run that cannot be read becomes the failure of that run; a
    report of a node that cannot be read is dropped, and None is returned."""
    try:
        form = _REPORT.decode(packed)
        if isinstance(form, NodeSeenForm):
            return _node_seen(source, form)
        report: Report | ObjectQuestion = _value(source, form)
        return _checked(report)
    except ValueError as fault:
        log.error("a node sent something that is no report", node=source.node, fault=str(fault))
        match unpack(packed):
            case (kind, str(task), int(fence), int(rank), *_) if kind in _BY_USER_CODE:
                failure = Failure(MALFORMED, f"its process wrote something that is no report: {fault}")
                at = Instant(source.arrived_at)
                return Ended(TaskId(task), Fence(fence), at, Ending.FAILED, failure=failure, rank=rank)
    return None


def _value(source: Source, form: Form) -> Any:
    kind, values, place, made, samples = READINGS[type(form)]
    fields = list(values(form))
    at = fields[place] = source.instant(fields[place])
    for index, make in made:
        fields[index] = make(source, fields[index])
    if samples is not None:
        fields[samples] = _samples(source, fields[samples], at)
    return kind(*fields) if isinstance(form, RunForm) else kind(source.node, *fields)


def _checked(report: Report | ObjectQuestion) -> Report | ObjectQuestion:
    match report:
        case Checkpointed(data=data, uri=uri) if (data is None) == (uri is None):
            raise MalformedReport("a checkpoint has either data or a uri")
        case Ended(ending=Ending.SUCCEEDED, result=None):
            raise MalformedReport("a run that succeeded has a result")
        case Ended(is_unproven=True, result=result) if result != ENDED_WELL:
            # An agent before TELLS_UNPROVEN_ENDS leaves the field out.
            return replace(report, is_unproven=False)
    return report


def _node_seen(source: Source, seen: NodeSeenForm) -> NodeReport:
    node = seen.node
    rest = node.cpu, Mib(node.memory_mb), node.max_runs, node.incarnation, node.boot_id
    environments = tuple(
        NodeEnvironment(key, state, source.instant(since), step, python, message)
        for key, state, since, step, python, message in sorted(node.environments)
    )
    devices = tuple(ReportedDevice(d[0], d[1], d[2], Mib(d[3]), d[4], d[5], d[6]) for d in seen.devices)
    runs = tuple((TaskId(task), Fence(fence), rank) for task, fence, rank in seen.runs)
    more = node.release, tuple(node.faults.items()), node.complete, tuple(node.versions.items())
    at = source.instant(seen.at)
    row = device.Node(NodeName(node.name), *rest, environments=environments)
    return NodeReport(row, devices, runs, at, *more, node.gpu_absence)
