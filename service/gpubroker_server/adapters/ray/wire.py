"""Orders and reports as bytes: plain values in msgpack, with a number that names the form."""

from collections.abc import Sequence
from typing import Any

import msgpack
from gpubroker.runtime.messages import Report as WireReport
from gpubroker.runtime.messages import RunOrder

from gpubroker_server.core.domain.model_orders import ServerSeen
from gpubroker_server.core.domain.orders import (
    ForgetOrder,
    GoOrder,
    Heartbeat,
    NodeLost,
    NodeSeen,
    Order,
    Report,
    RunId,
    Sampled,
    StartOrder,
    StopOrder,
    WatchOrder,
    WorldOrder,
)
from gpubroker_server.core.domain.units import DeviceKey, Mib
from gpubroker_server.ports.store import RunPayload

PROTOCOL = 7
"""Number of the form in which driver and agent speak; first value of every message between them."""
SPOKEN = (PROTOCOL - 1, PROTOCOL)
"""An agent outlives the service that made it, and services of two releases may stand by for one another: the
newest form that both speak is taken. Orders are the same in both."""
RELEASE_SINCE = 7
"""Forms from this one on say which release an agent is of."""


WireSample = tuple[Any, ...]
"""(uuid, used_mb, foreign_mb or None, by_holder, utilization or None)"""


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
            case GoOrder():
                return ("go", order.task, order.fence, order.rank, order.rank_zero_address)
            case WorldOrder():
                return ("world", order.task, order.fence, order.rank, order.ranks)
            case WatchOrder():
                return ("watch", order.task, order.fence, order.rank, order.pid, _by_uuid(order.devices))
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
            world_size=order.world_size,
            barrier=order.barrier,
            priority=order.priority,
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
            leases=_by_uuid(order.devices),
            memory_mb=order.memory_mb,
            result_limit_bytes=self._result_limit_bytes,
            checkpoint_limit_bytes=self._checkpoint_limit_bytes,
        )


def _by_uuid(devices: Sequence[tuple[DeviceKey, Mib]]) -> tuple[tuple[str, int], ...]:
    return tuple((key.rpartition("/")[2], mb) for key, mb in devices)


def write_reports(
    node: str,
    sent_at: float,
    reports: Sequence[WireReport],
    held_seconds: float = 0.0,
    protocol: int = PROTOCOL,
) -> bytes:
    """`held_seconds`: how long the question that this answers had waited for something to be told."""
    return pack((protocol, node, sent_at, held_seconds, reports))


def key_of(report: Report) -> RunId | None:
    """(task, fence, rank) of a report about a run; None for one about a node or a server."""
    if isinstance(report, NodeSeen | NodeLost | Heartbeat | Sampled | ServerSeen):
        return None
    return report.task, report.fence, report.rank
