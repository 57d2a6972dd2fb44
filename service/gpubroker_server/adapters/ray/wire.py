"""Orders and reports as bytes. They are plain values in msgpack, with the number of the protocol."""

import asyncio
import dataclasses
import math
import re
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import msgpack
import msgspec
from gpubroker.runtime.messages import OF_RAY, RunOrder, fields_left_out
from gpubroker.runtime.messages import Report as WireReport
from gpubroker.runtime.site.gpubroker_memory_limit import FRACTIONS, LIMITS_MB
from msgspec.structs import astuple

from gpubroker_server.adapters.ray.peers import Peer
from gpubroker_server.core.domain.device import DiskOrder, DiskReport, NodeSample
from gpubroker_server.core.domain.environment import Environment
from gpubroker_server.core.domain.model_orders import ServerReport
from gpubroker_server.core.domain.orders import (
    EnvironmentReported,
    ForgetOrder,
    GoOrder,
    Heartbeat,
    ItemsOrder,
    LogName,
    NodeLost,
    NodeReport,
    NodesListed,
    Order,
    PrepareOrder,
    Report,
    RunId,
    Sampled,
    StackOrder,
    StartOrder,
    StopOrder,
    WatchOrder,
    WorldOrder,
)
from gpubroker_server.core.domain.submission import RunSpec, told_variables
from gpubroker_server.core.domain.units import DeviceKey, Mib
from gpubroker_server.ports.executor import RunPayload
from gpubroker_server.ports.task_objects import ObjectAnswer, ObjectQuestion, OutputPart, PartAnswer

PROTOCOL = 14
"""The number of the newest protocol between driver and agent. The first value of every message is the number
of its protocol."""
SPOKEN = (8, 9, 10, 11, 12, 13, PROTOCOL)
"""The protocols that this release speaks, the newest last. An agent outlives the service that started it, so
a release also speaks the protocols since the last release. Both sides use the newest one that they share."""

TELLS_LOGS = 9
"""The first protocol in which agents report the output of runs."""
GUARDS_DISKS = 9
"""The first protocol in which agents list files that may be deleted, and delete them."""
TRIES_PEERS = 9
"""The first protocol in which agents try the ports of other nodes."""
TELLS_UNPROVEN_ENDS = 10
"""The first protocol in which agents report whether an end is unproven (`Ended.is_unproven`)."""
TELLS_GPU_STATE = 11
"""The first protocol in which agents report why a machine shows no GPU, and whether a GPU needs a reset."""
KNOWS_ARRAYS_AND_OBJECTS = 9
"""The first protocol in which agents know arrays, objects and worker sets. An earlier agent would run the
function or command of an array's worker once, without an item. It would pass the name of an object to a
function instead of the object, and would end the worker of a set with its object as the result."""
UNPACKS_UPLOADS = 12
"""The first protocol in which agents unpack the uploaded directory of a run and collect its outputs. An
earlier agent would start the run in another directory."""
STARTS_RAY = 13
"""The first protocol in which agents start a Ray cluster for a run that asks for one. An earlier agent would
run the command once per rank, without a cluster."""
PREPARES_ENVIRONMENTS = 14
"""The first protocol in which agents prepare environments. An earlier agent would start the run in the
service's own."""
_OBJECT_ID = re.compile(rb'(?:"object":"|\x8c@)[0-9a-f]{64}')
"""Matches the id of an object in JSON, and any text of 64 hexadecimal digits in a pickle."""

WireSample = tuple[Any, ...]
"""(uuid, used_mb, foreign_mb or None, by_holder, utilization or None)"""

MEASURE = ("measure",)
"""The order to measure all devices now."""


def log_order(log: LogName, first_byte: int) -> tuple[Any, ...]:
    """Return the order to report the output of a run from this byte on."""
    return "log", *log, first_byte


def disk_order(order: DiskOrder) -> tuple[Any, ...]:
    """Return the order to list the files that may be deleted, or to delete files."""
    about = tuple(map(astuple, order.roots)), order.spared, order.warn, order.old_seconds
    return "disk", order.request, *about, order.deletes, order.runs_sync, order.live, order.above


def prepare_order(order: PrepareOrder, definition: Environment, project: bytes) -> tuple[Any, ...]:
    """Return the order to prepare an environment. `project` is the archive of its pyproject.toml and
    uv.lock."""
    return "prepare", order.key, order.tenant, msgspec.json.encode(definition).decode(), project


def peers_order(peers: Sequence[Peer]) -> tuple[Any, ...]:
    """Return the order to try the ports of these nodes."""
    return "peers", peers


def object_order(answer: ObjectAnswer) -> tuple[Any, ...]:
    """Return the order that passes an answer about an object to a run."""
    asked = answer.asked
    run = asked.task, asked.fence, asked.rank, asked.object
    if isinstance(answer, PartAnswer):
        if isinstance(asked, OutputPart):
            return "output", *run, answer.stored_bytes, answer.is_over
        return "part", *run, answer.stored_bytes, answer.failure
    return "object", *run, answer.size_bytes, answer.asked.first_byte, answer.data, answer.failure


def least_form_for(payload: RunPayload) -> int:
    """Return the first protocol whose agents run this payload correctly."""
    spec = payload.spec
    if spec.environment is not None:
        return PREPARES_ENVIRONMENTS
    if spec.ray:
        return STARTS_RAY
    if spec.upload or spec.outputs:
        return UNPACKS_UPLOADS
    if spec.items is not None or spec.seat is not None or _OBJECT_ID.search(payload.arguments) is not None:
        return KNOWS_ARRAYS_AND_OBJECTS
    return SPOKEN[0]


_LENGTH_BYTES = 4


_PACKED_BYTES = 4096
"""The first size of a message's buffer, which grows as needed. The default of 256 KiB would be mapped and
unmapped for each message."""


def pack(value: Any) -> bytes:
    # Text from runs may hold lone surrogates, which must not hold up a node's reports.
    packed: bytes = msgpack.packb(value, use_bin_type=True, unicode_errors="replace", buf_size=_PACKED_BYTES)
    return packed


def unpack(data: bytes) -> Any:
    """Return decoded values. Sequences are returned as tuples, and bytes as bytes."""
    return msgpack.unpackb(data, use_list=False, raw=False, strict_map_key=False)


def frame(*parts: Any) -> bytes:
    """Return one message between the service and its driver process: its length, followed by msgpack."""
    data = pack(parts)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


async def read_frame(reader: asyncio.StreamReader) -> tuple[Any, ...] | None:
    """Return the next frame; None when the other side is gone."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        parts: tuple[Any, ...] = unpack(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return parts


class OrderWriter:
    """Writes orders. Each start contains the limits of results and checkpoints."""

    def __init__(self, result_limit_bytes: int, checkpoint_limit_bytes: int) -> None:
        self._result_limit_bytes = result_limit_bytes
        self._checkpoint_limit_bytes = checkpoint_limit_bytes

    def write(self, order: Order, payload: RunPayload | None) -> tuple[Any, ...]:
        """Return an order as plain values. The payload is needed only for a start."""
        run = order.task, order.fence, order.rank
        match order:
            case StartOrder():
                assert payload is not None
                return "start", order.incarnation, order.shareable, self._run_order(order, payload)
            case GoOrder():
                return "go", *run, order.rank_zero_address
            case WorldOrder(number=None):
                return "world", *run, order.ranks
            case WorldOrder():
                return "resized", *run, order.ranks, order.number
            case WatchOrder():
                return "watch", *run, order.pid, _by_uuid(order.devices)
            case ItemsOrder():
                return "items", *run, order.number, order.held, order.is_over
            case StopOrder():
                return "stop", *run, order.reason.value, order.grace_seconds
            case StackOrder():
                return "stack", *run, order.request
            case ForgetOrder():
                return "forget", *run

    def _run_order(self, order: StartOrder, payload: RunPayload) -> dict[str, Any]:
        """Return the fields of a RunOrder. Each comes from the order, the payload or the spec, the first
        that has it."""
        spec = payload.spec
        variables = told_variables(spec) if spec.is_told_more else {}
        given = {
            **dict(zip(_OF_SPEC, _of_spec(spec), strict=True)),
            **dict(zip(_OF_PAYLOAD, _of_payload(payload), strict=True)),
            **dict(zip(_OF_ORDER, _of_order(order), strict=True)),
            "env": {**spec.env, **variables, **_gpu_limits(order.shares)},
            "environment": payload.environment,
            "leases": _by_uuid(order.devices),
            "result_limit_bytes": self._result_limit_bytes,
            "checkpoint_limit_bytes": self._checkpoint_limit_bytes,
        }
        left_out = fields_left_out(spec.upload or spec.outputs, spec.environment)
        # Only commands start a Ray of their own.
        names = _RUN_ORDER + OF_RAY if spec.kind == "command" else _RUN_ORDER
        return {name: given[name] for name in names if name in given and name not in left_out}


_FIELDS = tuple(field.name for field in dataclasses.fields(RunOrder))
_RUN_ORDER = tuple(name for name in _FIELDS if name not in OF_RAY)
_OF_ORDER, _OF_PAYLOAD, _OF_SPEC = (
    tuple(name for name in _FIELDS if name in kind.__struct_fields__ and name != "environment")
    for kind in (StartOrder, RunPayload, RunSpec)
)
_of_order, _of_payload, _of_spec = attrgetter(*_OF_ORDER), attrgetter(*_OF_PAYLOAD), attrgetter(*_OF_SPEC)


def _gpu_limits(shares: Sequence[tuple[Mib, float]]) -> dict[str, str]:
    if not shares:
        return {}
    # The shares are rounded down, because those of one device must fit together.
    fractions = (f"{math.floor(share * 10_000) / 10_000:g}" for _mb, share in shares)
    return {FRACTIONS: ",".join(fractions), LIMITS_MB: ",".join(str(mb) for mb, _share in shares)}


def _by_uuid(devices: Sequence[tuple[DeviceKey, Mib]]) -> tuple[tuple[str, int], ...]:
    return tuple((key.rpartition("/")[2], mb) for key, mb in devices)


def write_reports(
    node: str,
    sent_at: float,
    reports: Sequence[WireReport],
    held_seconds: float = 0.0,
    protocol: int = PROTOCOL,
) -> bytes:
    """Return the encoded answer to a poll. `held_seconds` is the time for which the poll waited for a
    report."""
    if protocol == 8:
        reports = [_without_order_time(report) for report in reports if report[0] != "node_sampled"]
    if protocol < PREPARES_ENVIRONMENTS:
        reports = [_without_environments(report) for report in reports if report[0] != "environment"]
    if protocol < UNPACKS_UPLOADS:
        reports = [report for report in reports if report[0] != "output"]
    if protocol < TELLS_UNPROVEN_ENDS:
        reports = [report[:10] if report[0] == "ended" else report for report in reports]
    if protocol < TELLS_GPU_STATE:
        reports = [
            _without_gpu_state(report) if report[0] == "node_sampled" else report for report in reports
        ]
    return pack((protocol, node, sent_at, held_seconds, reports))


def _without_gpu_state(report: WireReport) -> WireReport:
    """Return a report for protocols before TELLS_GPU_STATE, which have six values of the health of a GPU."""
    *before, gpus, network, unreached = report
    return *before, {uuid: health[:6] for uuid, health in gpus.items()}, network, unreached


def _without_environments(report: WireReport) -> WireReport:
    """Return a report for protocols before PREPARES_ENVIRONMENTS, whose nodes have no environments."""
    if report[0] != "node_seen":
        return report
    kind, at, node, *rest = report
    return kind, at, {name: value for name, value in node.items() if name != "environments"}, *rest


def _without_order_time(report: WireReport) -> WireReport:
    """Return a report for protocol 8, in which a start lacks the time when the agent got the order."""
    return report[:6] if report[0] == "started" else report


def run_of(report: Report | ObjectQuestion) -> RunId | None:
    """Return the run that a report is about; None for a report about a node or a server."""
    about_nodes = (
        NodeReport
        | NodeLost
        | NodesListed
        | Heartbeat
        | Sampled
        | NodeSample
        | DiskReport
        | EnvironmentReported
    )
    if isinstance(report, about_nodes | ServerReport):
        return None
    return report.task, report.fence, report.rank
