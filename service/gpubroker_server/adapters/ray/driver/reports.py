"""Reports from bytes to values. A process with user code may have written anything, so all is checked."""

from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple, assert_never

import msgspec
import structlog
from msgspec import Meta, Struct

from gpubroker_server.adapters.ray.wire import SPOKEN, unpack
from gpubroker_server.core.domain import device
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import (
    MOST_HELD,
    Checkpointed,
    Ended,
    Ending,
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
from gpubroker_server.ports.task_objects import ObjectPart, ObjectQuestion, ObjectWanted

log = structlog.get_logger("gpubroker.ray")

MALFORMED = "malformed_report"
"""The kind of failure if the process of a run wrote something that is no report."""

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""A database column of four bytes."""
Position = Annotated[int, Meta(ge=0, le=2**62)]
"""Of a byte in a log or an object."""
Name = Annotated[str, Meta(max_length=2048, pattern=r"^[^\x00]*\Z")]
"""A column or a key. PostgreSQL takes no NUL there."""
Text = Annotated[str, Meta(max_length=128 * 1024)]
Time = Annotated[float, Meta(ge=0.0)]
Number = Annotated[float, Meta(ge=0.0, le=1e6)]
"""Finite."""
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
LogTail = Annotated[bytes, Meta(max_length=1024 * 1024)]


class MalformedReport(ValueError):
    """The text says which part of a report cannot be read."""


class AgentReports(NamedTuple):
    """One message of one agent."""

    node: NodeName
    protocol: int
    reports: list[Report | ObjectQuestion]
    ahead_seconds: float
    """How far the node's clock is ahead of the reader's; never too little, and too much by at most the time
    that the message and the question before it took."""


class ReportReader:
    """Reads what agents report, and moves its times from the node's clock to the reader's."""

    def __init__(self, cluster: str, now: Callable[[], float]) -> None:
        self._cluster = cluster
        self._now = now

    def read(self, data: bytes, asked_seconds_ago: float) -> AgentReports:
        """Raises ValueError for a form that is not spoken here.

        The message is as old as its way here: the time since the question that it answers, less the time for
        which the question waited at the agent.
        """
        protocol, node, sent_at, held_seconds, reports = _MESSAGE.decode(data)
        if protocol not in SPOKEN:
            raise ValueError(f"reports of node {node} have form {protocol}, this service reads {SPOKEN}")
        arrived_at = self._now() - max(0.0, asked_seconds_ago - held_seconds)
        source = Source(self._cluster, NodeName(node), sent_at, arrived_at)
        read = [read for report in reports if (read := _read(source, report)) is not None]
        return AgentReports(source.node, protocol, read, sent_at - arrived_at)


class Source(NamedTuple):
    cluster: str
    node: NodeName
    sent_at: float
    """On the node's clock."""
    arrived_at: float
    """The same instant on the reader's clock."""

    def instant(self, at: float) -> Instant:
        """No report is younger than its message."""
        return Instant(self.arrived_at - max(0.0, self.sent_at - at))


Sample = tuple[Name, Count, Count | None, dict[Name, Count], Number | None]
"""(UUID, used MiB, foreign MiB or None, MiB by holder, utilization or None)"""

Health = tuple[Number | None, Number | None, Count | None, Count | None, Position | None, Position | None]
"""Watts, degrees Celsius, MHz of the SM and of the memory, ECC errors, XID; as GpuHealth."""


class Form(Struct, array_like=True, forbid_unknown_fields=True):
    """A report as it is written: its kind, then these fields in their order."""


class BeatForm(Form, tag="beat"):
    at: Time


class SampledForm(Form, tag="sampled"):
    at: Time
    samples: tuple[Sample, ...]


class NodeSampledForm(Form, tag="node_sampled"):
    at: Time
    cpu: Share
    memory_total_mb: Count
    memory_available_mb: Count
    memory_pressure: Share | None
    disks: tuple[tuple[Name, Position, Position], ...]
    """(path, bytes in total, free ones)"""
    received_bytes: Position
    sent_bytes: Position
    store: tuple[Count, Count | None] | None
    """(MiB in total, spilled)"""
    gpus: dict[Name, Health]
    network: Share | None
    unreached: tuple[device.UnreachedNode, ...]


class DiskForm(Form, tag="disk"):
    at: Time
    request: Name
    files: tuple[device.FoundFile, ...]
    kept: tuple[tuple[Name, Count], ...]
    is_first: bool
    message: Text


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


class NodeSeenForm(Form, tag="node_seen"):
    at: Time
    node: NodeForm
    devices: tuple[tuple[Name, Name, Count, Count, bool, Name, bool], ...]
    """(UUID, kind, index, physical MiB, simulated, UUID of the GPU that it is a part of, split)"""
    runs: tuple[tuple[Name, Count, Count], ...]


class NodeLostForm(Form, tag="node_lost"):
    at: Time
    incarnation: Name
    why: Text


class RunForm(Form):
    task: Name
    fence: Count
    rank: Count
    at: Time


class StartedForm(RunForm, tag="started"):
    pid: Count
    ordered_at: Time | None = None


class ReadyForm(RunForm, tag="ready"):
    address: Name


class ProgressedForm(RunForm, tag="progressed"):
    fraction: Share | None
    message: Text


class LoadedForm(RunForm, tag="loaded"):
    running: Count
    waiting: Count
    cpu_percent: Number
    answered: Count


class CheckpointedForm(RunForm, tag="checkpointed"):
    sequence: Count
    digest: Name
    data: bytes | None
    uri: Name | None


class ItemsForm(RunForm, tag="items"):
    number: Count
    results: tuple[tuple[Count, Number, Count, bytes | None, tuple[Name, Text, Text] | None], ...]
    """(number, seconds, tries, result, failure) of each item"""
    held: tuple[tuple[Count, Count], ...]
    wanted: Count


class EndedForm(RunForm, tag="ended"):
    ending: Ending
    result: bytes | None
    result_format: Literal["json", "cloudpickle", "object"]
    failure: tuple[Name, Text, Text] | None
    log_tail: LogTail


class StackForm(RunForm, tag="stack"):
    request: Name
    stack: Text
    message: Text


class WantedForm(RunForm, tag="wanted"):
    object: Name
    first_byte: Position


class PartForm(RunForm, tag="part"):
    object: Name
    size_bytes: Position
    first_byte: Position
    data: bytes


class LoggedForm(RunForm, tag="logged"):
    stream: Literal["stdout", "stderr"]
    first_byte: Position
    data: bytes
    is_final: bool


class GoneForm(RunForm, tag="gone"):
    proof: Name
    samples: tuple[Sample, ...]


OfRun = (
    StartedForm
    | ReadyForm
    | ProgressedForm
    | LoadedForm
    | CheckpointedForm
    | ItemsForm
    | EndedForm
    | LoggedForm
    | StackForm
    | WantedForm
    | PartForm
    | GoneForm
)
OfNode = BeatForm | SampledForm | NodeSampledForm | DiskForm | NodeSeenForm | NodeLostForm

_MESSAGE = msgspec.msgpack.Decoder(tuple[int, str, float, float, tuple[msgspec.Raw, ...]])
_REPORT: msgspec.msgpack.Decoder[OfRun | OfNode] = msgspec.msgpack.Decoder(OfRun | OfNode)
_BY_USER_CODE = frozenset(
    {"started", "ready", "progressed", "loaded", "checkpointed", "items", "part", "ended"}
)
"""Kinds that are written where user code runs."""


def _read(source: Source, packed: msgspec.Raw) -> Report | ObjectQuestion | None:
    """A run has failed if its report cannot be read. None for anything else that cannot be read."""
    try:
        form = _REPORT.decode(packed)
        return _of_run(source, form) if isinstance(form, RunForm) else _of_node(source, form)
    except ValueError as fault:
        log.error("a node sent something that is no report", node=source.node, fault=str(fault))
        match unpack(packed):
            case (kind, str(task), int(fence), int(rank), *_) if kind in _BY_USER_CODE:
                failure = Failure(MALFORMED, f"its process wrote something that is no report: {fault}")
                at = Instant(source.arrived_at)
                return Ended(TaskId(task), Fence(fence), at, Ending.FAILED, failure=failure, rank=rank)
    return None


def _of_run(source: Source, it: OfRun) -> Report | ObjectQuestion:
    run = TaskId(it.task), Fence(it.fence), source.instant(it.at)
    match it:
        case StartedForm():
            ordered_at = None if it.ordered_at is None else source.instant(it.ordered_at)
            return Started(*run, it.pid, it.rank, ordered_at)
        case ReadyForm():
            return Ready(*run, it.address, it.rank)
        case ProgressedForm():
            return Progressed(*run, it.fraction, it.message, it.rank)
        case LoadedForm():
            return Loaded(*run, it.running, it.waiting, it.cpu_percent, it.rank, it.answered)
        case CheckpointedForm():
            if (it.data is None) == (it.uri is None):
                raise MalformedReport("a checkpoint has either data or a uri")
            return Checkpointed(*run, it.sequence, it.digest, it.data, it.uri, it.rank)
        case ItemsForm():
            results = tuple(
                ItemResult(*one[:4], None if one[4] is None else Failure(*one[4])) for one in it.results
            )
            return ItemsReported(*run, it.number, results, _held(it.held), it.wanted, it.rank)
        case EndedForm():
            if it.result is None and it.ending is Ending.SUCCEEDED:
                raise MalformedReport("a run that succeeded has a result")
            failure = None if it.failure is None else Failure(*it.failure)
            return Ended(*run, it.ending, it.result, it.result_format, failure, it.log_tail, it.rank)
        case StackForm():
            return Stacked(*run, it.request, it.stack, it.message, it.rank)
        case WantedForm():
            return ObjectWanted(*run, it.object, it.first_byte, it.rank)
        case PartForm():
            return ObjectPart(*run, it.object, it.size_bytes, it.first_byte, it.data, it.rank)
        case LoggedForm():
            return Logged(*run, it.stream, it.first_byte, it.data, it.is_final, it.rank)
        case GoneForm():
            return Gone(*run, _proof(it.proof), _samples(source, run[2], it.samples), it.rank)
        case _:
            assert_never(it)


def _held(ranges: tuple[ItemRange, ...]) -> tuple[ItemRange, ...]:
    """The leader looks at each of these items."""
    last = count = 0
    for first, behind in ranges:
        if not last <= first < behind:
            raise MalformedReport("the items that a worker holds are ranges in ascending order, none twice")
        last, count = behind, count + behind - first
    if count > MOST_HELD:
        raise MalformedReport(f"a worker holds at most {MOST_HELD} items, this one says {count}")
    return ranges


def _proof(text: str) -> Proof:
    try:
        return Proof(text)
    except ValueError:
        raise MalformedReport(f"{text[:50]!r} proves nothing that this release knows") from None


def _of_node(source: Source, it: OfNode) -> Report:
    at = source.instant(it.at)
    match it:
        case BeatForm():
            return Heartbeat(source.node, at)
        case SampledForm():
            return Sampled(source.node, at, _samples(source, at, it.samples))
        case NodeSampledForm():
            return device.NodeSample(
                source.node, at, it.cpu, Mib(it.memory_total_mb), Mib(it.memory_available_mb),
                it.memory_pressure, tuple(device.DiskSample(*disk) for disk in it.disks),
                it.received_bytes, it.sent_bytes, None if it.store is None else device.StoreSample(*it.store),
                {uuid: device.GpuHealth(*one) for uuid, one in it.gpus.items()}, it.network, it.unreached,
            )  # fmt: skip
        case DiskForm():
            return device.DiskReport(source.node, at, it.request, it.files, it.kept, it.is_first, it.message)
        case NodeLostForm():
            return NodeLost(source.node, it.incarnation, at, it.why)
        case NodeSeenForm():
            node = it.node
            rest = node.cpu, Mib(node.memory_mb), node.max_runs, node.incarnation, node.boot_id
            devices = tuple(ReportedDevice(d[0], d[1], d[2], Mib(d[3]), d[4], d[5], d[6]) for d in it.devices)
            runs = tuple((TaskId(task), Fence(fence), rank) for task, fence, rank in it.runs)
            more = node.release, tuple(node.faults.items()), node.complete, tuple(node.versions.items())
            return NodeReport(device.Node(NodeName(node.name), *rest), devices, runs, at, *more)
        case _:
            assert_never(it)


def _samples(source: Source, at: Instant, samples: tuple[Sample, ...]) -> tuple[device.DeviceSample, ...]:
    return tuple(
        device.DeviceSample(
            device_key(source.cluster, source.node, uuid),
            at,
            Mib(used_mb),
            None if foreign_mb is None else Mib(foreign_mb),
            {holder: Mib(mb) for holder, mb in by_holder.items()},
            utilization,
        )
        for uuid, used_mb, foreign_mb, by_holder, utilization in samples
    )
