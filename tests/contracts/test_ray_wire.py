"""Orders and reports arrive as they were sent."""

from typing import Any

import pytest
from gpubroker.runtime.messages import RunOrder, is_report
from gpubroker_server.adapters.ray.driver.reports import MALFORMED, ReportReader
from gpubroker_server.adapters.ray.wire import PROTOCOL, OrderWriter, pack, unpack, write_reports
from gpubroker_server.core.domain.device import DeviceSample, Node
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import (
    MAX_HELD,
    Checkpointed,
    Ended,
    Ending,
    Failure,
    ForgetOrder,
    Gone,
    GoOrder,
    ItemsReported,
    NodeLost,
    NodeReport,
    Progressed,
    Ready,
    Report,
    ReportedDevice,
    Sampled,
    Started,
    StartOrder,
    StopOrder,
    WorldOrder,
)
from gpubroker_server.core.domain.task import StopReason
from gpubroker_server.core.domain.units import DeviceKey, Fence, Instant, Mib, NodeName, Seconds, TaskId
from gpubroker_server.ports.executor import RunPayload
from gpubroker_server.ports.store import RunSpec
from msgspec.structs import replace

T, F, N = TaskId("t"), Fence(3), NodeName("n1")
AT = Instant(1000.0)
SAMPLE = (DeviceSample(DeviceKey("c/n1/GPU-a"), AT, Mib(5), Mib(1), {"t:3": Mib(4)}, 0.5),)
WIRE_SAMPLE = [("GPU-a", 5, 1, {"t:3": 4}, 0.5)]
DEVICE = ReportedDevice("GPU-a", "sim", 0, Mib(9), True)
NODE = {
    "name": "n1",
    "cpu": 2.0,
    "memory_mb": 10,
    "max_runs": 4,
    "incarnation": "i",
    "boot_id": "b",
    "release": "",
}


def carried(
    *wire_reports: object,
    sent_at: float = 1000.0,
    now: float = 1000.0,
    asked_seconds_ago: float = 0.0,
    held_seconds: float = 0.0,
) -> list[Any]:
    data = write_reports("n1", sent_at, wire_reports, held_seconds)  # type: ignore[arg-type]  # also junk
    told = ReportReader("c", lambda: now).read(data, asked_seconds_ago)
    assert (told.node, told.protocol) == ("n1", PROTOCOL)
    return told.reports


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (("started", "t", 3, 1, 1000.0, 42), Started(T, F, AT, 42, 1)),
        (("ready", "t", 3, 1, 1000.0, "10.0.0.1:4711"), Ready(T, F, AT, "10.0.0.1:4711", 1)),
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
            Gone(T, F, AT, Proof.PROCESS_ABSENT, SAMPLE),
        ),
        (("sampled", 1000.0, WIRE_SAMPLE), Sampled(N, AT, SAMPLE)),
        (
            ("sampled", 1000.0, [("GPU-a", 5, None, {}, None)]),
            Sampled(N, AT, (DeviceSample(DeviceKey("c/n1/GPU-a"), AT, Mib(5), None),)),
        ),
        (("node_lost", 1000.0, "i", "dead"), NodeLost(N, "i", AT, "dead")),
        (
            ("node_seen", 1000.0, NODE, [("GPU-a", "sim", 0, 9, True, "", False)], [("t", 3, 1)]),
            NodeReport(
                Node(N, 2.0, Mib(10), 4, "i", "b"),
                (ReportedDevice("GPU-a", "sim", 0, Mib(9), True),),
                ((T, F, 1),),
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


@pytest.mark.parametrize(("asked_seconds_ago", "held_seconds"), [(0.0, 0.0), (20.0, 20.0), (1.0, 0.0)])
def test_a_message_tells_how_far_the_nodes_clock_is_ahead_at_most(
    asked_seconds_ago: float, held_seconds: float
) -> None:
    data = write_reports("n1", 5000.0, [("beat", 5000.0)], held_seconds)
    told = ReportReader("c", lambda: 4960.0).read(data, asked_seconds_ago)
    assert told.ahead_seconds == 40.0 + asked_seconds_ago - held_seconds


def test_an_agent_tells_the_versions_that_nodes_share() -> None:
    [report] = carried(("node_seen", 1000.0, {**NODE, "versions": {"python": "3.12.1"}}, [], []))
    assert isinstance(report, NodeReport)
    assert report.versions == (("python", "3.12.1"),)


def test_the_age_of_a_report_includes_its_time_on_the_way() -> None:
    [report] = carried(("sampled", 999.0, WIRE_SAMPLE), now=5000.0, asked_seconds_ago=80.0, held_seconds=20.0)
    assert isinstance(report, Sampled)
    assert report.at == report.samples[0].at == 4939.0


def test_no_report_is_younger_than_its_message() -> None:
    [report] = carried(("started", "t", 3, 0, 1e300, 42))
    assert isinstance(report, Started)
    assert report.at == 1000.0


STARTED = ("started", "t", 3, 0, 1000.0, 42)
PROGRESSED = ("progressed", "t", 3, 0, 1000.0, 0.5, "hm")
CHECKPOINTED = ("checkpointed", "t", 3, 0, 1000.0, 7, "abc", b"state", None)
ENDED = ("ended", "t", 3, 0, 1000.0, "succeeded", b"{}", "json", None, b"")
ITEMS = ("items", "t", 3, 0, 1000.0, 1, (), ((0, 2), (2, 5), (7, 8)), 10)
NAN = float("nan")
NO_RANGES = (((0, 2**31 - 1),), ((0, 2), (1, 3)), ((5, 6), (0, 1)), ((0, 0),), ((3, 2),), ((0, 5),) * 9)
"""Of items that a worker says it holds: too many, some twice, out of order, empty."""


def swapped(report: tuple[object, ...], place: int, value: object) -> tuple[object, ...]:
    return (*report[:place], value, *report[place + 1 :])


@pytest.mark.parametrize(
    "told",
    [
        *(swapped(STARTED, 4, at) for at in (None, "now", NAN, -1e300)),
        *(swapped(STARTED, 5, pid) for pid in (None, "42", 4.2, True, -1, 2**40)),
        *(swapped(PROGRESSED, 5, fraction) for fraction in ("half", NAN, 2.0)),
        swapped(PROGRESSED, 6, b"bytes"),
        swapped(PROGRESSED, 6, "x" * 200_000),
        *(swapped(CHECKPOINTED, 5, sequence) for sequence in ("7", None, 2**31)),
        *(swapped(CHECKPOINTED, 6, digest) for digest in (None, "a\0b")),
        *(swapped(CHECKPOINTED, 7, data) for data in ("text", None, 5)),
        *((*CHECKPOINTED[:7], None, uri) for uri in (5, "a\0b", "x" * 3000)),
        swapped(CHECKPOINTED, 8, "data and uri"),
        *(swapped(ENDED, 5, ending) for ending in list[Any](("won", None, []))),
        *(swapped(ENDED, 6, result) for result in (5, "text", None)),
        *(swapped(ENDED, 7, form) for form in list[Any](("yaml", None, {}))),
        *(swapped(ENDED, 8, failure) for failure in ("no", ("exception", "no"), ("exception", 5, ""))),
        *(swapped(ENDED, 9, tail) for tail in (None, "text", b"x" * 2_000_000)),
        *(swapped(ITEMS, 7, ranges) for ranges in NO_RANGES),
        STARTED[:5],
        (*ENDED, "more"),
    ],
)
def test_a_malformed_report_fails_its_run_and_no_other(told: tuple[object, ...]) -> None:
    failed, other = carried(told, ("started", "u", 1, 0, 1000.0, 43))
    assert isinstance(failed, Ended)
    assert (failed.task, failed.fence, failed.ending) == (T, F, Ending.FAILED)
    assert failed.failure is not None
    assert failed.failure.kind == MALFORMED
    assert other == Started(TaskId("u"), Fence(1), AT, 43)


@pytest.mark.parametrize(
    "told",
    [
        5,
        None,
        "ended",
        (),
        (None,),
        ("unheard-of", "t", 3, 0, 1000.0),
        ("started", None, 3, 0, 1000.0, 42),
        ("ended", "t", "3", 0, 1000.0, "succeeded", b"{}", "json", None, b""),
        ("gone", "t", 3, 0, 1000.0, "process_absent", [("GPU-a", "5", 1, {}, None)]),
        ("gone", "t", 3, 0, 1000.0, "it must be", []),
        ("sampled", 1000.0, [("GPU-a", 5, 1, {"t:3": None}, 0.5)]),
        ("sampled", 1000.0, None),
        ("node_seen", 1000.0, {"name": "n1"}, [], []),
        ("node_seen", 1000.0, {**NODE, "cpu": "many"}, [], []),
        ("node_seen", 1000.0, NODE, [("GPU-a", "sim", 0, 9)], []),
        ("node_seen", 1000.0, NODE, [], [("t",)]),
    ],
)
def test_a_malformed_report_that_names_no_run_is_dropped(told: object) -> None:
    assert carried(told, STARTED) == [Started(T, F, AT, 42)]


def test_both_sides_know_how_many_items_a_worker_holds() -> None:
    assert carried(ITEMS) == [ItemsReported(T, F, AT, 1, (), ((0, 2), (2, 5), (7, 8)), 10)]
    for ranges in (((0, MAX_HELD),), *NO_RANGES):
        told = ("items", "t", 3, 0, 1000.0, 1, (), ranges, 10)
        assert is_report(told) is (ranges not in NO_RANGES)
        assert isinstance(carried(told)[0], ItemsReported) is (ranges not in NO_RANGES)


def test_messages_of_users_may_hold_any_character() -> None:
    progressed, ended = carried(
        swapped(PROGRESSED, 6, "a\0b"), swapped(ENDED, 8, ("exception", "embedded \0 and \ud800", ""))
    )
    assert isinstance(progressed, Progressed)
    assert isinstance(ended, Ended)
    assert ended.ending is Ending.SUCCEEDED


def test_reports_in_an_unknown_form_are_refused() -> None:
    with pytest.raises(ValueError, match="form 999"):
        ReportReader("c", lambda: 0.0).read(pack((999, "n1", 0.0, 0.0, [])), 0.0)


def test_a_start_carries_everything_the_run_needs_with_devices_by_uuid() -> None:
    spec = RunSpec(kind="function", python="3.11", env={"A": "b"}, result_format="cloudpickle")
    payload = RunPayload(spec, b"\x80args", b"state", None, 3, "name", "tenant", 60.0)
    order = StartOrder(T, F, N, "i", ((DeviceKey("c/n1/GPU-a"), Mib(100)),), shareable=False, priority=70)
    written = unpack(pack(OrderWriter(1000, 500).write(order, payload)))
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
        priority=70,
        result_limit_bytes=1000,
        checkpoint_limit_bytes=500,
    )


def test_a_run_on_a_part_of_a_device_is_told_its_share_rounded_down() -> None:
    devices = ((DeviceKey("c/n1/GPU-a"), Mib(100)), (DeviceKey("c/n1/GPU-b"), Mib(900)))
    order = StartOrder(T, F, N, "i", devices, shareable=False, shares=((Mib(90), 0.33339), (Mib(900), 1.0)))
    payload = RunPayload(RunSpec("entrypoint", env={"A": "b"}), b"", None, None, 1, "", "default", None)
    written = unpack(pack(OrderWriter(1000, 500).write(order, payload)))
    limits = {"GPUBROKER_GPU_FRACTIONS": "0.3333,1", "GPUBROKER_GPU_LIMITS_MB": "90,900"}
    assert written[3]["env"] == {"A": "b", **limits}


def test_run_finds_what_it_is_told_of_its_specification_in_its_environment() -> None:
    order = StartOrder(T, F, N, "i", (), shareable=False)
    spec = RunSpec("entrypoint", env={"A": "b"}, roles=("generate", "train"), retry_of=TaskId("old"))
    payload = RunPayload(spec, b"", None, None, 1, "", "default", None)
    written = unpack(pack(OrderWriter(1000, 500).write(order, payload)))
    told = {"GPUBROKER_ROLES": "generate,train", "GPUBROKER_RETRY_OF": "old"}
    assert written[3]["env"] == {"A": "b", **told}


def test_the_other_orders_name_the_claim() -> None:
    form = OrderWriter(0, 0)
    stop = StopOrder(T, F, N, "i", StopReason.PREEMPT, Seconds(2.5), rank=1)
    assert form.write(stop, None) == ("stop", "t", 3, 1, "preempt", 2.5)
    go = GoOrder(T, F, N, "i", "10.0.0.1:4711", rank=1)
    assert form.write(go, None) == ("go", "t", 3, 1, "10.0.0.1:4711")
    world = WorldOrder(T, F, N, "i", (0, 1, 3), rank=1)
    assert form.write(world, None) == ("world", "t", 3, 1, (0, 1, 3))
    assert form.write(replace(world, number=4), None) == ("resized", "t", 3, 1, (0, 1, 3), 4)
    assert form.write(ForgetOrder(T, F, N, "i"), None) == ("forget", "t", 3, 0)
