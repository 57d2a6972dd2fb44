"""Orders and reports arrive as they were sent."""

import pytest
from gpubroker.runtime.messages import RunOrder

from service.adapters.ray.wire import OrderForm, ReportForm, pack, unpack, write_reports
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
    Progressed,
    Report,
    Sampled,
    SeenDevice,
    Started,
    StartOrder,
    StopOrder,
)
from service.core.task import StopReason
from service.core.units import DeviceKey, Fence, Instant, Mib, NodeName, Seconds, TaskId
from service.ports import RunPayload, RunSpec

T, F, N = TaskId("t"), Fence(3), NodeName("n1")
AT = Instant(1000.0)
SAMPLE = (DeviceSample(DeviceKey("c/n1/GPU-a"), AT, Mib(5), Mib(1), {"t:3": Mib(4)}, 0.5),)
WIRE_SAMPLE = [("GPU-a", 5, 1, {"t:3": 4}, 0.5)]
DEVICE = SeenDevice("GPU-a", "sim", 0, Mib(9), True)
NODE = {"name": "n1", "cpu": 2.0, "memory_mb": 10, "max_runs": 4, "incarnation": "i", "boot_id": "b"}


def carried(*wire_reports: tuple[object, ...], sent_at: float = 1000.0, now: float = 1000.0) -> list[Report]:
    return ReportForm("c", lambda: now).read(write_reports("n1", sent_at, wire_reports))


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (("started", "t", 3, 1, 1000.0, 42), Started(T, F, AT, 42, 1)),
        (("progressed", "t", 3, 0, 1000.0, None, "hm"), Progressed(T, F, AT, None, "hm")),
        (
            ("checkpointed", "t", 3, 0, 1000.0, 7, "abc", b"\xff\x00", None),
            Checkpointed(T, F, AT, 7, "abc", b"\xff\x00", None),
        ),
        (
            ("ended", "t", 3, 0, 1000.0, "failed", None, "json", ("exception", "no", "Trace"), b"log"),
            Ended(T, F, AT, Ending.FAILED, None, "json", Failure("exception", "no", "Trace"), b"log"),
        ),
        (
            ("ended", "t", 3, 0, 1000.0, "succeeded", b"{}", "json", None, b""),
            Ended(T, F, AT, Ending.SUCCEEDED, b"{}"),
        ),
        (
            ("gone", "t", 3, 0, 1000.0, "process_absent", WIRE_SAMPLE),
            Gone(T, F, AT, "process_absent", SAMPLE),
        ),
        (("sampled", 1000.0, WIRE_SAMPLE), Sampled(N, AT, SAMPLE)),
        (("node_lost", 1000.0, "i", "dead"), NodeLost(N, "i", AT, "dead")),
        (
            ("node_seen", 1000.0, NODE, [("GPU-a", "sim", 0, 9, True)], [("t", 3)]),
            NodeSeen(
                Node(N, 2.0, Mib(10), 4, "i", "b"),
                (SeenDevice("GPU-a", "sim", 0, Mib(9), True),),
                ((T, F),),
                AT,
            ),
        ),
    ],
)
def test_a_report_arrives_as_it_was_sent(sent: tuple[object, ...], expected: Report) -> None:
    assert carried(sent) == [expected]


def test_times_are_moved_from_the_nodes_clock_to_the_readers() -> None:
    [report] = carried(("started", "t", 3, 0, 990.0, 42), sent_at=1000.0, now=5000.0)
    assert isinstance(report, Started)
    assert report.at == 4990.0


def test_reports_of_another_release_are_refused() -> None:
    with pytest.raises(ValueError, match="form 999"):
        ReportForm("c", lambda: 0.0).read(pack((999, "n1", 0.0, [])))


def test_a_start_carries_what_the_run_needs_and_devices_by_uuid() -> None:
    spec = RunSpec(kind="function", python="3.11", env={"A": "b"}, result_format="cloudpickle")
    payload = RunPayload(spec, b"\x80args", b"state", None, 3, "name", "tenant", 60.0)
    order = StartOrder(T, F, N, "i", ((DeviceKey("c/n1/GPU-a"), Mib(100)),), shareable=False)
    written = unpack(pack(OrderForm(1000, 500).write(order, payload)))
    assert written[:3] == ("start", "i", False)
    assert RunOrder(**written[3]) == RunOrder(
        task="t",
        fence=3,
        kind="function",
        arguments=b"\x80args",
        python="3.11",
        env={"A": "b"},
        result_format="cloudpickle",
        resume_state=b"state",
        attempt=3,
        name="name",
        tenant="tenant",
        leases=(("GPU-a", 100),),
        result_limit_bytes=1000,
        checkpoint_limit_bytes=500,
    )


def test_stops_and_forgets_name_the_claim() -> None:
    form = OrderForm(0, 0)
    stop = StopOrder(T, F, N, "i", StopReason.PREEMPT, Seconds(2.5), rank=1)
    assert form.write(stop, None) == ("stop", "t", 3, 1, "preempt", 2.5)
    assert form.write(ForgetOrder(T, F, N, "i"), None) == ("forget", "t", 3, 0)
