"""One of each message between service, agents and run processes, as each form writes it.

`tests/contracts/forms` holds the bytes of each form that a release has spoken, and of the current one. Those
of a release are never written again: its agents and runs go on sending them.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpubroker.runtime import messages
from gpubroker.runtime.messages import (
    ENDED_WELL,
    KNOWS_ENVIRONMENTS,
    KNOWS_NOTICE,
    KNOWS_UPLOADS,
    RESIZES,
    TELLS_OUTPUT,
    RunOrder,
    is_unproven_end,
)
from gpubroker_server.adapters.ray.agent.run_files import RunRecord
from gpubroker_server.adapters.ray.agent.runner_process import own_start
from gpubroker_server.adapters.ray.options import AgentConfig
from gpubroker_server.adapters.ray.peers import Peer
from gpubroker_server.adapters.ray.wire import (
    MEASURE,
    PREPARES_ENVIRONMENTS,
    STARTS_RAY,
    TELLS_GPU_STATE,
    TELLS_LOGS,
    TELLS_UNPROVEN_ENDS,
    UNPACKS_UPLOADS,
    OrderWriter,
    disk_order,
    log_order,
    object_order,
    pack,
    peers_order,
    prepare_order,
    write_reports,
)
from gpubroker_server.core.domain.device import DiskOrder, FileClass, FoundFile, WatchedRoot
from gpubroker_server.core.domain.environment import Environment
from gpubroker_server.core.domain.orders import (
    ForgetOrder,
    GoOrder,
    ItemsOrder,
    LogName,
    Order,
    PrepareOrder,
    StackOrder,
    StartOrder,
    StopOrder,
    WatchOrder,
    WorldOrder,
)
from gpubroker_server.core.domain.task import StopReason
from gpubroker_server.core.domain.units import DeviceKey, Fence, Instant, Mib, NodeName, Seconds, TaskId
from gpubroker_server.ports.executor import RunPayload
from gpubroker_server.ports.store import RunSpec
from gpubroker_server.ports.task_objects import (
    ObjectPart,
    ObjectWanted,
    OutputPart,
    PartAnswer,
    WantedAnswer,
)
from msgspec import to_builtins
from msgspec.structs import replace

FORMS = Path(__file__).with_name("forms")

NOW = Instant(1000.0)
AT = TaskId("t"), Fence(3), NodeName("n1"), "a.1"
GPU = DeviceKey("c/n1/GPU-a")
RUN = RunOrder(
    task="t",
    fence=3,
    kind="function",
    rank=1,
    entrypoint="jobs:train",
    command=("train", "-v"),
    arguments=b"\x80args",
    python="3.11",
    env={"A": "b"},
    result_format="cloudpickle",
    working_directory="/work",
    resume_state=b"state",
    resume_uri="s3://state",
    attempt=3,
    name="name",
    tenant="tenant",
    leases=(("GPU-a", 100),),
    result_limit_bytes=1000,
    checkpoint_limit_bytes=500,
    priority=70,
    world_size=2,
    barrier=True,
    memory_mb=64,
)
UPLOADED = dataclasses.replace(RUN, upload="ab" * 32, outputs=("runs/**",))
"""The same with a directory, which came with form 12 of agents."""
WITH_RAY = dataclasses.replace(
    UPLOADED, kind="command", env={"A": "b", "GPUBROKER_RAY": "private"}, cpu=2.0, custom=(("fpga", 1.0),)
)
"""A command that becomes a Ray cluster, which came with form 13 of agents."""
IN_ENVIRONMENT = dataclasses.replace(WITH_RAY, environment="e1")
"""The same with an environment, which came with form 14 of agents."""
PREPARED = dataclasses.replace(
    IN_ENVIRONMENT, interpreter="/env/bin/python", prefix="/env", brought="/brought/functions"
)
"""The same once the agent has filled in the environment, which came with form 10 of run processes."""
ENVIRONMENT = Environment(python="3.11", requirements=("numpy>=2",))
SPEC = RunSpec(
    kind="function", entrypoint="jobs:train", command=("train", "-v"), python="3.11", env={"A": "b"},
    result_format="cloudpickle", working_directory="/work",
)  # fmt: skip
PAYLOAD = RunPayload(SPEC, b"\x80args", b"state", "s3://state", 3, "name", "tenant", 60.0)
UPLOADED_PAYLOAD = replace(PAYLOAD, spec=replace(SPEC, upload=UPLOADED.upload, outputs=UPLOADED.outputs))
RAY_PAYLOAD = replace(UPLOADED_PAYLOAD, spec=replace(UPLOADED_PAYLOAD.spec, kind="command", ray="private"))
START = StartOrder(
    *AT, ((GPU, Mib(100)),), shareable=False, priority=70, rank=1, world_size=2, barrier=True,
    memory_mb=Mib(64),
)  # fmt: skip
RAY_START = replace(START, cpu=2.0, custom=(("fpga", 1.0),))
IN_ENVIRONMENT_PAYLOAD = replace(
    RAY_PAYLOAD, spec=replace(RAY_PAYLOAD.spec, environment=ENVIRONMENT), environment="e1"
)
PREPARE_ORDER = prepare_order(
    PrepareOrder(NodeName("n1"), "a.1", "e1", TaskId("t"), "tenant"), ENVIRONMENT, b"archive"
)
ORDERS: tuple[Order, ...] = (
    START,
    GoOrder(*AT, "10.0.0.1:4711", rank=1),
    WorldOrder(*AT, (0, 1), rank=1),
    WorldOrder(*AT, (0, 1, 2), rank=1, number=1),
    WatchOrder(*AT, 42, ((GPU, Mib(100)),)),
    StopOrder(*AT, StopReason.PREEMPT, Seconds(2.5), rank=1),
    StackOrder(*AT, "r1", rank=1),
    ForgetOrder(*AT, rank=1),
    ItemsOrder(*AT, 4, ((0, 5), (7, 8)), is_over=False, rank=1),
)  # fmt: skip

SAMPLES = [("GPU-a", 5, 1, {"t:3": 4}, 0.5)]
NODE = {"name": "n1", "cpu": 2.0, "memory_mb": 10, "max_runs": 4, "incarnation": "a.1", "boot_id": "b"}
NODE |= {"release": "0.1.0"}
NEWS: tuple[tuple[Any, ...], ...] = (
    ("started", "t", 3, 1, 1000.0, 42),
    ("ready", "t", 3, 1, 1000.0, "10.0.0.1:4711"),
    ("progressed", "t", 3, 1, 1000.0, 0.5, "half"),
    ("checkpointed", "t", 3, 1, 1000.0, 7, "abc", b"state", None),
    ("loaded", "t", 3, 1, 1000.0, 2, 5, 40.0, 17),
    (
        "items",
        "t",
        3,
        1,
        1000.0,
        4,
        ((5, 0.5, 1, b"1", None), (6, 0.5, 2, None, ("exception", "no", "Trace"))),
        ((0, 5), (7, 8)),
        9,
    ),
    ("ended", "t", 3, 1, 1000.0, "failed", None, "json", ("exception", "no", "Trace"), b"log"),
    ("ended", "t", 3, 1, 1000.0, "succeeded", ENDED_WELL, "json", None, b""),
)
"""What a run's process says and its agent passes on."""
SINCE_LOGS = ("loaded", "items")
"""Kinds that came with forms 9 of agents and 6 of run processes."""
WANTED = ("wanted", "t", 3, 1, 1000.0, "abc")
PART = ("part", "t", 3, 1, 1000.0, "abc", 9, 5, b"data")
OUTPUT = ("output", "t", 3, 1, 1000.0, "abc", 9, 5, b"data", 2, "left out: 1 that are links", "n1")
PRINTED = ("printed", "t", 3, 1, 1000.0, b"out", b"err")
LOGGED = ("logged", "t", 3, 1, 1000.0, "stdout", 5, b"line\n", True)
LOG_ORDER = log_order(LogName(TaskId("t"), Fence(3), 1, "stdout"), 5)
NODE_SEEN = ("node_seen", 1000.0, NODE, [("GPU-a", "sim", 0, 9, True, "", False)], [("t", 3, 1)])
OF_AN_AGENT: tuple[tuple[Any, ...], ...] = (
    ("gone", "t", 3, 1, 1000.0, "process_absent", SAMPLES),
    ("sampled", 1000.0, SAMPLES),
    ("beat", 1000.0),
    ("node_lost", 1000.0, "a.1", "dead"),
)
NODE_SAMPLED = (
    *("node_sampled", 1000.0, 0.5, 100, 60, 0.25, [("/", 1000, 400)], 7, 8, (64, 3)),
    {"GPU-a": (300.5, 54, 1980, 2619, 0, 79)},
    *(0.75, [("n2", "10.0.0.2:9", "Connection refused")]),
)
IN_NEED = {"GPU-a": (300.5, 54, 1980, 2619, 0, 79, 48, True, "reset")}
"""The health of a GPU that needs a reset."""
ABSENT = {**NODE, "gpu_absence": "the driver is not loaded"}
"""A node whose machine shows no GPU."""
BUILDING = ("environment", 1000.0, "e1", "preparing", "downloading packages", "", "")
REMOVED = ("environment", 1000.0, "e1", None, "", "", "")
WITH_ENVIRONMENTS = {**NODE, "environments": [("e1", "ready", 1000.0, "", "3.11", "")]}
ASKED = (*WANTED, 5)
"""The agent says from where on it lacks the object."""
_WANTED, _PART = ObjectWanted(*AT[:2], NOW, "abc", 5, 1), ObjectPart(*AT[:2], NOW, "abc", 9, 5, b"data", 1)
ANSWERS = (
    object_order(WantedAnswer(AT[2], _WANTED, 9, b"data", "")),
    object_order(PartAnswer(AT[2], _PART, 4, "")),
)
"""About objects."""
_OUTPUT = OutputPart(*AT[:2], NOW, "abc", 9, 5, b"data", 2, "", AT[2], 1)
OUTPUT_ANSWER = object_order(PartAnswer(AT[2], _OUTPUT, 9, ""))
FOUND = FoundFile("/scratch", "a/old.log", FileClass.LOG, 9, 10**18, 7)
DISK_ORDER = disk_order(
    DiskOrder(
        "r2", (WatchedRoot("/scratch", FileClass.LOG),), ("/data",), 0.6, Seconds(604_800.0), (FOUND,),
        live=("/scratch/state",), node=AT[2],
    )
)  # fmt: skip
PEERS_ORDER = peers_order([Peer("n2", "10.0.0.2", (8, 9))])
DISK_REPORT = ("disk", 1000.0, "r2", [tuple(FOUND)], [("young", 3)], True, "")
STACK = ("stack", "t", 3, 1, 1000.0, "r1", "Thread 1", "")
RECORD = RunRecord("t", 3, 1, (("GPU-a", 100),), "runner/n1/x", 42, 4711, "ray-node", 5, 64)
CONFIG = AgentConfig(
    node="n1",
    instance="i",
    devices=(("GPU-a", "sim", 0, 9, ""),),
    spares=2,
    warm_runners=1,
    cpu=2.0,
    memory_mb=10,
    max_runs=4,
    process_memory_mb=8,
    task_path=("/work",),
    task_user="nobody",
    run_dir="/runs",
    sample_period_seconds=2.0,
    beat_seconds=2.0,
    idle_stop_seconds=600.0,
    keepalive="",
)


def orders_in(agent: int) -> Sequence[Order]:
    """Those of this form: the one before knew no arrays, no stacks, and no ranks that join."""
    if agent >= STARTS_RAY:
        return RAY_START, *ORDERS[1:]
    if agent > 8:
        return ORDERS
    before = [order for order in ORDERS if not isinstance(order, ItemsOrder | StackOrder)]
    return [order for order in before if not isinstance(order, WorldOrder) or order.number is None]


def news_of(runner: int) -> tuple[tuple[Any, ...], ...]:
    told = NEWS if runner >= KNOWS_NOTICE else NEWS[:-1]
    if runner < TELLS_OUTPUT:
        return tuple(news for news in told if news[0] not in SINCE_LOGS)
    return (*told, PRINTED, WANTED, PART)


def told_by(agent: int) -> Sequence[tuple[Any, ...]]:
    """What a run's process has said. From TELLS_UNPROVEN_ENDS on, an agent adds to an end whether it is
    unproven; the process of this one spoke a form before KNOWS_NOTICE."""
    if agent < TELLS_UNPROVEN_ENDS:
        return NEWS[:-1]
    return (*NEWS[:-2], *((*news, is_unproven_end(news, KNOWS_NOTICE - 1)) for news in NEWS[-2:]))


def items(runner: int) -> Sequence[tuple[Any, ...]]:
    config = replace(CONFIG, instance="instance")
    new = (
        ("items", ("t", 3, 1), 4, ((0, 5), (7, 8)), False),
        ("object", ("t", 3, 1), "abc", None, ("object_missing", "no")),
        ("part", ("t", 3, 1), "abc", 4, ""),
    )
    of_growth = (("resized", ("t", 3, 1), (0, 1, 2), 1),) if runner >= RESIZES else ()
    return (
        *(new if runner > 5 else ()),
        ("share", RUN.to_wire()),
        own_start(alone_in(runner), config, Path("/runs/t.log"), "10.0.0.1"),
        ("go", ("t", 3, 1), "10.0.0.1:4711"),
        ("world", ("t", 3, 1), (0, 1)),
        *of_growth,
        ("retell", ("t", 3, 1)),
        ("stop", ("t", 3, 1)),
    )


def alone_in(runner: int) -> RunOrder:
    """Return the order of a run in a process of its own, as this form knows it."""
    if runner >= KNOWS_ENVIRONMENTS:
        return PREPARED
    if runner >= messages.STARTS_RAY:
        return WITH_RAY
    return UPLOADED if runner >= KNOWS_UPLOADS else RUN


def description(runner: int) -> Mapping[str, Any]:
    return {"speaks": (runner,), "pid": 42, "shared": False, "runs": [RUN.to_wire()]}


def written(agent: int, runner: int) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each file, as this software writes it in these forms."""
    form = OrderWriter(1000, 500)
    about_logs, about_outputs = agent >= TELLS_LOGS, agent >= UNPACKS_UPLOADS
    has_environments = agent >= PREPARES_ENVIRONMENTS
    payload = RAY_PAYLOAD if agent >= STARTS_RAY else UPLOADED_PAYLOAD if about_outputs else PAYLOAD
    payload = IN_ENVIRONMENT_PAYLOAD if has_environments else payload
    orders = [
        *(form.write(o, payload) for o in orders_in(agent)),
        *([LOG_ORDER, *ANSWERS, DISK_ORDER, PEERS_ORDER] if about_logs else []),
        *([OUTPUT_ANSWER] if about_outputs else []),
        *([PREPARE_ORDER] if has_environments else []),
        MEASURE,
    ]
    yield f"agent-{agent}-orders.msgpack", pack(orders)
    first, *others = [news for news in told_by(agent) if about_logs or news[0] not in SINCE_LOGS]
    reports = [NODE_SEEN, (*first, 999.5), *others, *OF_AN_AGENT]
    reports += [LOGGED, STACK, ASKED, PART, DISK_REPORT] if about_logs else []
    reports += [OUTPUT] if about_outputs else []
    reports.append(NODE_SAMPLED)  # the form before leaves it out
    if agent >= TELLS_GPU_STATE:
        reports.append((*NODE_SAMPLED[:-3], IN_NEED, *NODE_SAMPLED[-2:]))
        reports.append(("node_seen", 1000.0, ABSENT, [], []))
    if has_environments:
        reports += [BUILDING, REMOVED, ("node_seen", 1000.0, WITH_ENVIRONMENTS, [], [])]
    yield f"agent-{agent}-reports.msgpack", write_reports("n1", 1000.0, reports, 1.5, agent)
    yield f"agent-{agent}-record.json", json.dumps(to_builtins(RECORD)).encode()
    yield f"agent-{agent}-config.json", CONFIG.to_json().encode()
    yield f"runner-{runner}-items.msgpack", pack(items(runner))
    yield f"runner-{runner}-news.msgpack", pack(list(enumerate(news_of(runner))))
    yield f"runner-{runner}-description.msgpack", pack(description(runner))
