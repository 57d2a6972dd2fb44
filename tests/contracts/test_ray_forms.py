"""Messages of every form that is spoken are read, and written as they were frozen."""

import asyncio
import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpubroker.runtime import messages
from gpubroker.runtime.host import RunHost
from gpubroker.runtime.messages import RunKey, RunOrder, is_report
from gpubroker.runtime.process import ProcessSetup
from gpubroker_server.adapters.ray import wire
from gpubroker_server.adapters.ray.agent.run_files import RunFiles
from gpubroker_server.adapters.ray.agent.runner_process import describe
from gpubroker_server.adapters.ray.driver.reports import ReportReader
from gpubroker_server.adapters.ray.options import AgentConfig
from gpubroker_server.adapters.ray.wire import unpack
from gpubroker_server.core.domain.device import (
    DeviceSample,
    DiskReport,
    DiskSample,
    GpuHealth,
    Node,
    NodeSample,
    StoreSample,
    UnreachedNode,
)
from gpubroker_server.core.domain.environment import EnvironmentState, NodeEnvironment
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import (
    Checkpointed,
    Ended,
    Ending,
    EnvironmentReported,
    Failure,
    Gone,
    Heartbeat,
    ItemResult,
    ItemsReported,
    Loaded,
    Logged,
    NodeLost,
    NodeReport,
    Progressed,
    Ready,
    ReportedDevice,
    Sampled,
    Stacked,
    Started,
)
from gpubroker_server.core.domain.units import DeviceKey, Fence, Instant, Mib, NodeName, TaskId
from gpubroker_server.ports.task_objects import ObjectPart, ObjectWanted, OutputPart
from msgspec.structs import replace

from tests.contracts.form_samples import (
    ANSWERS,
    CONFIG,
    DISK_ORDER,
    FORMS,
    FOUND,
    IN_ENVIRONMENT,
    LOG_ORDER,
    OUTPUT_ANSWER,
    PAYLOAD,
    PEERS_ORDER,
    PREPARE_ORDER,
    RECORD,
    RUN,
    UPLOADED,
    WITH_RAY,
    alone_in,
    news_of,
    orders_in,
    written,
)

SPOKEN = list(product(wire.SPOKEN, messages.SPOKEN))
AGENTS = pytest.mark.parametrize("agent", wire.SPOKEN)
RUNNERS = pytest.mark.parametrize("runner", messages.SPOKEN)

T, F, N, AT = TaskId("t"), Fence(3), NodeName("n1"), Instant(1000.0)
OF_RUN = T, F, AT
SAMPLE = (DeviceSample(DeviceKey("c/n1/GPU-a"), AT, Mib(5), Mib(1), {"t:3": Mib(4)}, 0.5),)

NODE_SAMPLED = NodeSample(
    N, AT, 0.5, Mib(100), Mib(60), 0.25, (DiskSample("/", 1000, 400),), 7, 8, StoreSample(64, 3),
    {"GPU-a": GpuHealth(300.5, 54, 1980, 2619, 0, 79)}, 0.75,
    (UnreachedNode(NodeName("n2"), "10.0.0.2:9", "Connection refused"),),
)  # fmt: skip
IN_NEED = replace(
    NODE_SAMPLED,
    gpus={"GPU-a": GpuHealth(300.5, 54, 1980, 2619, 0, 79, 48, remap_pending=True, recovery="reset")},
)
ABSENT = NodeReport(
    Node(N, 2.0, Mib(10), 4, "a.1", "b"), (), (), AT, release="0.1.0", gpu_absence="the driver is not loaded"
)

RESULTS = (
    ItemResult(5, 0.5, 1, b"1", None),
    ItemResult(6, 0.5, 2, None, Failure("exception", "no", "Trace")),
)
UNPROVEN = Ended(*OF_RUN, Ending.SUCCEEDED, messages.ENDED_WELL, rank=1, is_unproven=True)
OF_ITEMS = ItemsReported(*OF_RUN, 4, RESULTS, ((0, 5), (7, 8)), 9, 1)


OUTPUT = OutputPart(*OF_RUN, "abc", 9, 5, b"data", 2, "left out: 1 that are links", N, 1)


OF_ENVIRONMENTS = [
    EnvironmentReported(N, AT, "e1", EnvironmentState.PREPARING, "downloading packages"),
    EnvironmentReported(N, AT, "e1", None),
    NodeReport(
        Node(
            N,
            2.0,
            Mib(10),
            4,
            "a.1",
            "b",
            environments=(NodeEnvironment("e1", EnvironmentState.READY, AT, python="3.11"),),
        ),
        (),
        (),
        AT,
        release="0.1.0",
    ),
]


def ordered_in(agent: int) -> RunOrder:
    """Return the order of the run, as this form of agents knows it."""
    if agent >= wire.PREPARES_ENVIRONMENTS:
        return IN_ENVIRONMENT
    if agent >= wire.STARTS_RAY:
        return WITH_RAY
    return UPLOADED if agent >= wire.UNPACKS_UPLOADS else RUN


def frozen(name: str) -> bytes:
    return (FORMS / name).read_bytes()


@pytest.mark.parametrize(("agent", "runner"), SPOKEN)
def test_each_form_is_written_as_it_was_frozen(agent: int, runner: int) -> None:
    """If this fails for the newest: it is a new form. Give it a number, and freeze it beside the others."""
    assert {name: data == frozen(name) for name, data in written(agent, runner)} == {
        name: True for name, _ in written(agent, runner)
    }


@AGENTS
def test_orders_are_read(agent: int) -> None:
    start, *others = unpack(frozen(f"agent-{agent}-orders.msgpack"))
    assert start[:3] == ("start", "a.1", False)
    assert RunOrder.from_wire(start[3]) == ordered_in(agent)
    writer = wire.OrderWriter(1000, 500)
    about_runs = [unpack(wire.pack(writer.write(o, PAYLOAD))) for o in orders_in(agent)[1:]]
    more = [LOG_ORDER, *ANSWERS, *(unpack(wire.pack(it)) for it in (DISK_ORDER, PEERS_ORDER))]
    more += [OUTPUT_ANSWER] if agent >= wire.UNPACKS_UPLOADS else []
    more += [PREPARE_ORDER] if agent >= wire.PREPARES_ENVIRONMENTS else []
    assert others == [*about_runs, *(more if agent >= wire.TELLS_LOGS else []), wire.MEASURE]


@AGENTS
def test_reports_are_read(agent: int) -> None:
    node, protocol, reports, ahead_seconds = ReportReader("c", lambda: 1000.0).read(
        frozen(f"agent-{agent}-reports.msgpack"), 0.0
    )
    assert (node, protocol, ahead_seconds) == ("n1", agent, 0.0)
    assert reports == [
        NodeReport(
            Node(N, 2.0, Mib(10), 4, "a.1", "b"),
            (ReportedDevice("GPU-a", "sim", 0, Mib(9), True),),
            ((T, F, 1),),
            AT,
            release="0.1.0",
        ),
        Started(*OF_RUN, 42, 1, None if agent == 8 else Instant(999.5)),
        Ready(*OF_RUN, "10.0.0.1:4711", 1),
        Progressed(*OF_RUN, 0.5, "half", 1),
        Checkpointed(*OF_RUN, 7, "abc", b"state", None, 1),
        *([Loaded(*OF_RUN, 2, 5, 40.0, 1, 17), OF_ITEMS] if agent > 8 else []),
        Ended(*OF_RUN, Ending.FAILED, None, "json", Failure("exception", "no", "Trace"), b"log", 1),
        *([UNPROVEN] if agent >= wire.TELLS_UNPROVEN_ENDS else []),
        Gone(*OF_RUN, Proof.PROCESS_ABSENT, SAMPLE, 1),
        Sampled(N, AT, SAMPLE),
        Heartbeat(N, AT),
        NodeLost(N, "a.1", AT, "dead"),
        *([Logged(*OF_RUN, "stdout", 5, b"line\n", True, 1)] if agent >= wire.TELLS_LOGS else []),
        *([] if agent == 8 else [Stacked(*OF_RUN, "r1", "Thread 1", "", 1)]),
        *([] if agent == 8 else [ObjectWanted(*OF_RUN, "abc", 5, 1)]),
        *([] if agent == 8 else [ObjectPart(*OF_RUN, "abc", 9, 5, b"data", 1)]),
        *([] if agent == 8 else [DiskReport(N, AT, "r2", (FOUND,), (("young", 3),), is_first=True)]),
        *([OUTPUT] if agent >= wire.UNPACKS_UPLOADS else []),
        *([] if agent == 8 else [NODE_SAMPLED]),
        *([IN_NEED, ABSENT] if agent >= wire.TELLS_GPU_STATE else []),
        *(OF_ENVIRONMENTS if agent >= wire.PREPARES_ENVIRONMENTS else []),
    ]


@pytest.mark.parametrize(
    ("ending", "result", "unproven"),
    [("succeeded", messages.ENDED_WELL, True), ("succeeded", b"{}", False), ("stopped", None, False)],
)
def test_exit_code_0_is_unproven_if_an_earlier_agent_reports_it(
    ending: str, result: bytes | None, unproven: bool
) -> None:
    told = ("ended", "t", 3, 1, 1000.0, ending, result, "json", None, b"")
    message = wire.write_reports("n1", 1000.0, [told], protocol=wire.TELLS_UNPROVEN_ENDS - 1)
    [report] = ReportReader("c", lambda: 1000.0).read(message, 0.0).reports
    assert isinstance(report, Ended)
    assert report.is_unproven is unproven


@pytest.mark.parametrize("said", [True, False])
def test_a_later_agent_says_itself_whether_an_end_is_unproven(said: bool) -> None:
    told = ("ended", "t", 3, 1, 1000.0, "succeeded", messages.ENDED_WELL, "json", None, b"", said)
    [report] = ReportReader("c", lambda: 1000.0).read(wire.write_reports("n1", 1000.0, [told]), 0.0).reports
    assert isinstance(report, Ended)
    assert report.is_unproven is said


@pytest.mark.parametrize("protocol", messages.SPOKEN)
def test_only_a_process_of_an_earlier_form_leaves_its_commands_end_open(protocol: int) -> None:
    told = ("ended", "t", 3, 1, 1000.0, "succeeded", messages.ENDED_WELL, "json", None, b"")
    assert messages.is_unproven_end(told, protocol) is (protocol < messages.KNOWS_NOTICE)


@AGENTS
def test_a_record_is_read(agent: int, tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "n1", "boot")
    files.write_record(RECORD)
    [path] = (tmp_path / "n1").iterdir()
    path.write_bytes(frozen(f"agent-{agent}-record.json"))
    assert files.records() == [RECORD]


@AGENTS
def test_a_configuration_is_read(agent: int) -> None:
    assert AgentConfig.from_json(frozen(f"agent-{agent}-config.json").decode()) == CONFIG


@RUNNERS
def test_a_process_carries_out_the_orders_of_an_agent(runner: int) -> None:
    done: list[tuple[Any, ...]] = []
    methods: tuple[str, ...] = (
        "start_shared",
        "start_alone",
        "go",
        "change_world",
        "report_again",
        "stop",
        "answer_items",
    )
    methods += ("take_object", "answer_part")
    assert all(hasattr(RunHost, name) for name in methods)
    noted = {
        name: lambda *given, name=name, **more: done.append((name, *given, *more.values()))
        for name in methods
    }
    for item in unpack(frozen(f"runner-{runner}-items.msgpack")):
        tell_output = runner >= messages.TELLS_OUTPUT
        host = SimpleNamespace(_child=None, **noted)
        RunHost.take(host, item, tell_output=tell_output)  # type: ignore[arg-type]
    key = RunKey("t", 3, 1)
    alone = alone_in(runner)
    new = [
        ("answer_items", key, 4, ((0, 5), (7, 8)), False),
        ("take_object", key, "abc", None, ("object_missing", "no")),
        ("answer_part", key, "abc", 4, ""),
    ]
    assert done == [
        *(new if runner > 5 else []),
        ("start_shared", RUN, runner >= messages.TELLS_OUTPUT),
        ("start_alone", alone, ProcessSetup("instance", "nobody", "10.0.0.1", "n1"), Path("/runs/t.log")),
        ("go", key, "10.0.0.1:4711"),
        ("change_world", key, (0, 1)),
        *([("change_world", key, (0, 1, 2), 1)] if runner >= messages.RESIZES else []),
        ("report_again", key),
        ("stop", key),
    ]


@RUNNERS
def test_the_reports_of_a_process_are_read(runner: int) -> None:
    told = unpack(frozen(f"runner-{runner}-news.msgpack"))
    assert [report for _, report in told if is_report(report)] == list(news_of(runner))


@RUNNERS
async def test_agent_and_process_agree_on_the_newest_form_that_both_speak(runner: int) -> None:
    told = await describe(an_actor(frozen(f"runner-{runner}-description.msgpack")), 10.0)
    assert told["protocol"] == runner
    assert RunOrder.from_wire(told["runs"][0]) == RUN


async def test_a_process_that_shares_no_form_is_refused() -> None:
    strange = wire.pack({"speaks": (999, 1000), "pid": 1, "shared": False, "runs": ()})
    with pytest.raises(ValueError, match=r"\(999, 1000\)"):
        await describe(an_actor(strange), 10.0)


def an_actor(answer: bytes) -> Any:
    async def tell() -> bytes:
        return answer

    return SimpleNamespace(describe=SimpleNamespace(remote=lambda: asyncio.ensure_future(tell())))


def test_field_another_release_adds_is_dropped_and_one_it_lacks_defaulted(
    tmp_path: Path,
) -> None:
    order = {**RUN.to_wire(), "colour": "grey"}
    del order["memory_mb"], order["priority"]
    read = RunOrder.from_wire(order)
    assert (read.task, read.memory_mb, read.priority) == ("t", 0, 0)

    config = {**json.loads(CONFIG.to_json()), "colour": "grey"}
    assert AgentConfig.from_json(json.dumps(config)) == CONFIG

    files = RunFiles(tmp_path / "n1", "boot")
    files.write_record(RECORD)
    [path] = (tmp_path / "n1").iterdir()
    card = {**json.loads(path.read_text()), "colour": "grey"}
    del card["memory_mb"]
    path.write_text(json.dumps(card))
    assert [(found.key, found.memory_mb) for found in files.records()] == [(RECORD.key, 0)]
