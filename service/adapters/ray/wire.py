"""Orders and reports as bytes and back: plain values in msgpack, with a number that names the form."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgpack
from gpubroker.runtime.messages import Report as WireReport
from gpubroker.runtime.messages import RunOrder

from service.core.device import DeviceSample, Node
from service.core.orders import (
    Checkpointed,
    Ended,
    Ending,
    Failure,
    ForgetOrder,
    Gone,
    NodeLost,
    NodeSeen,
    Order,
    Progressed,
    Report,
    Sampled,
    SeenDevice,
    Started,
    StartOrder,
    StopOrder,
)
from service.core.units import Fence, Instant, Mib, NodeName, TaskId, device_key
from service.ports import RunPayload

log = logging.getLogger("gpubroker.ray")

PROTOCOL = 1
"""First value of every message between driver and agent. Another number is refused."""


WireSample = tuple[Any, ...]
"""(uuid, used_mb, foreign_mb, by_holder, utilization)"""


def pack(value: Any) -> bytes:
    # Text of runs may hold what no encoding knows; one such letter must not hold up a node's reports.
    packed: bytes = msgpack.packb(value, use_bin_type=True, unicode_errors="replace")
    return packed


def unpack(data: bytes) -> Any:
    """Sequences come back as tuples, bytes as bytes."""
    return msgpack.unpackb(data, use_list=False, raw=False, strict_map_key=False)


class OrderForm:
    """Writes orders; knows the limits that travel with each start."""

    def __init__(self, result_limit_bytes: int, checkpoint_limit_bytes: int) -> None:
        self._result_limit_bytes = result_limit_bytes
        self._checkpoint_limit_bytes = checkpoint_limit_bytes

    def write(self, order: Order, payload: RunPayload | None) -> tuple[Any, ...]:
        """A start needs its payload."""
        match order:
            case StartOrder():
                assert payload is not None
                return (
                    "start",
                    order.incarnation,
                    order.shareable,
                    self._run_order(order, payload).to_wire(),
                )
            case StopOrder():
                reason = order.reason.value
                return ("stop", order.task, order.fence, order.rank, reason, order.grace_seconds)
            case ForgetOrder():
                return ("forget", order.task, order.fence, order.rank)

    def _run_order(self, order: StartOrder, payload: RunPayload) -> RunOrder:
        spec = payload.spec
        return RunOrder(
            task=order.task,
            fence=order.fence,
            rank=order.rank,
            kind=spec.kind,
            entrypoint=spec.entrypoint,
            command=spec.command,
            arguments=payload.arguments,
            python=spec.python,
            env=dict(spec.env),
            result_format=spec.result_format,
            working_directory=spec.working_directory,
            resume_state=payload.resume_state,
            resume_uri=payload.resume_uri,
            attempt=payload.attempt,
            name=payload.name,
            tenant=payload.tenant,
            leases=tuple((key.rpartition("/")[2], mb) for key, mb in order.devices),
            result_limit_bytes=self._result_limit_bytes,
            checkpoint_limit_bytes=self._checkpoint_limit_bytes,
        )


def write_reports(node: str, sent_at: float, reports: Sequence[WireReport]) -> bytes:
    return pack((PROTOCOL, node, sent_at, reports))


class ReportForm:
    """Reads reports. Times are moved from the node's clock to the reader's by when a batch was sent."""

    def __init__(self, cluster: str, now: Callable[[], float]) -> None:
        self._cluster = cluster
        self._now = now

    def read(self, data: bytes) -> list[Report]:
        protocol, node, sent_at, reports = unpack(data)
        if protocol != PROTOCOL:
            raise ValueError(f"reports of node {node} have form {protocol}, this service reads {PROTOCOL}")
        shift = self._now() - sent_at
        return [read for report in reports if (read := self._readable(node, shift, report)) is not None]

    def _readable(self, node: str, shift: float, report: WireReport) -> Report | None:
        """A process that user code runs in may have written anything; what is no report is left out."""
        try:
            return self._report(node, shift, report)
        except (ValueError, TypeError) as fault:
            log.error("node %s sent what is no report: %s", node, fault)
            return None

    def _report(self, node: str, shift: float, report: WireReport) -> Report:
        match report:
            case ("started", task, fence, rank, at, pid):
                return Started(task, fence, Instant(at + shift), pid, rank)
            case ("progressed", task, fence, rank, at, fraction, message):
                return Progressed(task, fence, Instant(at + shift), fraction, message, rank)
            case ("checkpointed", task, fence, rank, at, sequence, digest, data, uri):
                return Checkpointed(task, fence, Instant(at + shift), sequence, digest, data, uri, rank)
            case ("ended", task, fence, rank, at, ending, result, form, failure, tail):
                fault = None if failure is None else Failure(*failure)
                when = Instant(at + shift)
                return Ended(task, fence, when, Ending(ending), result, form, fault, tail, rank)
            case ("gone", task, fence, rank, at, proof, samples):
                when = Instant(at + shift)
                return Gone(task, fence, when, proof, self._samples(node, when, samples), rank)
            case ("sampled", at, samples):
                when = Instant(at + shift)
                return Sampled(NodeName(node), when, self._samples(node, when, samples))
            case ("node_seen", at, described, devices, runs):
                return NodeSeen(
                    Node(**described),
                    tuple(SeenDevice(*device) for device in devices),
                    tuple((TaskId(task), Fence(fence)) for task, fence in runs),
                    Instant(at + shift),
                )
            case ("node_lost", at, incarnation, why):
                return NodeLost(NodeName(node), incarnation, Instant(at + shift), why)
            case _:
                raise ValueError(f"node {node} sent an unknown report {report[0]!r}")

    def _samples(
        self, node: str, at: Instant, samples: Iterable[tuple[Any, ...]]
    ) -> tuple[DeviceSample, ...]:
        return tuple(
            DeviceSample(
                device_key(self._cluster, node, uuid),
                at,
                Mib(used),
                Mib(foreign),
                dict(by_holder),
                utilization,
            )
            for uuid, used, foreign, by_holder, utilization in samples
        )


def key_of(report: Report) -> tuple[TaskId, Fence, int] | None:
    """(task, fence, rank) of a report about a run; None for one about a node."""
    if isinstance(report, NodeSeen | NodeLost | Sampled):
        return None
    return report.task, report.fence, report.rank
