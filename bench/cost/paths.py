"""The paths that are counted. One client drives each path, and sends a request when it has the answer to the
previous one."""

import asyncio
import gc
import json
import random
import tracemalloc
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from msgspec import Struct

from bench.cost import items
from bench.cost.counting import CLIENT, SERVICE, CallCounter, CallCounts, current_process
from bench.cost.memory import FRAMES, Memory, live_by_process, measure_memory
from bench.cost.ray_stand_in import begin_in, ray_replaced
from bench.cost.service_here import ServiceHere, service_here
from bench.cost.virtual_time import VirtualLoop

WARM_UP = 30
TIMES, RUNS, SUBMITS = 50, 200, 100
"""The numbers of operations. Runs and submits take one second, in which each periodic job of an idle service
runs equally often."""
MEASURED = 100
"""The number of operations for which memory is measured."""
MAX_CALLED = 300
"""The number of functions of which the calls are kept."""
BATCH = 1000
ITEMS_BEFORE, ITEMS_COUNTED = 750, 1000
"""The numbers of items before and during the count. The counted items begin and end between two reports of
the worker, which are half a second apart."""
PAUSE_SECONDS = 0.01
"""The seconds between two submits, in which the leader plans."""

DEVICE_MB = 24_576
SIMULATED = {"ENGINE": "simulated", "SIMULATED_DEVICES": json.dumps([{"memory_mb": DEVICE_MB}])}
NOOP = {"entrypoint": "bench.tasks:noop"}
FOR_A_DAY = {**NOOP, "kwargs": {"seconds": 86_400}}
QUEUED = {"run": NOOP, "resources": {"gpu_mb": 1024}}

MODEL_PORT = 8000
TENSOR_BYTES = 64


class Counted(Struct, frozen=True):
    """The calls and bytes that one operation of a path takes."""

    path: str
    calls: dict[str, float]
    """Process -> the number of calls."""
    live_bytes: dict[str, float] = {}
    """Process -> the bytes that are left."""
    peak_bytes: float = 0.0
    """The peak bytes of all processes together."""
    most_called: dict[str, list[tuple[str, float]]] = {}
    """Process -> (function, calls) of the functions that are called most often."""


async def _counted(
    path: str,
    counter: CallCounter,
    operate: Callable[[], Awaitable[object]],
    *,
    warm_up: int = WARM_UP,
    times: int = TIMES,
    units: int = 1,
) -> Counted:
    """Count the calls and bytes of `operate`. Each call of it carries out `units` operations of the path."""
    for _ in range(warm_up):
        await operate()
    counter.begin()
    for _ in range(times):
        await operate()
    counts = counter.end()
    return _summed(path, counts, await measure_memory(operate, min(times, MEASURED)), times * units, units)


def _summed(path: str, counts: CallCounts, memory: Memory, operations: int, units: int) -> Counted:
    calls = {process: total / operations for process, total in counts.by_process().items()}
    return Counted(
        path,
        calls,
        {process: memory.live_bytes.get(process, 0.0) / units for process in calls},
        memory.peak_bytes / units,
        {
            process: [(name, count / operations) for name, count in counts.most_called(process, MAX_CALLED)]
            for process in calls
        },
    )


async def tasks(counter: CallCounter, _loop: VirtualLoop, folder: Path) -> AsyncIterator[Counted]:
    """Count one accepted task on SQLite, alone and in a batch, while a task that does not end holds the only
    device."""
    async with service_here(folder, ENTRYPOINTS="bench.tasks:*", **SIMULATED) as here:
        holder = await here.ask("POST", "/tasks", {"run": FOR_A_DAY, "resources": {"gpu_mb": DEVICE_MB}})
        await here.wait_until(f"/tasks/{holder['id']}", "state", "running")
        single = here.encoded("POST", "/tasks", json.dumps(QUEUED))
        batch = here.encoded("POST", "/tasks/batch", json.dumps({"tasks": [QUEUED] * BATCH}))

        async def submit(request: bytes, status: int, pause_seconds: float) -> None:
            await here.must_answer(request, status)
            await asyncio.sleep(pause_seconds)

        yield await _counted("accept", counter, lambda: submit(single, 202, PAUSE_SECONDS), times=SUBMITS)
        yield await _counted(
            "batch", counter, lambda: submit(batch, 207, 1.0), warm_up=1, times=2, units=BATCH
        )


async def runs(counter: CallCounter, loop: VirtualLoop, folder: Path) -> AsyncIterator[Counted]:
    """Count one no-op run from POST to result in a warm runner, and one item of an array of one worker."""
    with ray_replaced(loop, folder) as address:
        settings = {"RAY__ADDRESS": address, "SIMULATED_DEVICES": json.dumps([{"memory_mb": 1024}])}
        async with service_here(folder, ENTRYPOINTS="bench.*:*", **settings) as here:
            body = json.dumps({"run": NOOP, "resources": {"cpu": 0.02}})
            run = here.encoded("POST", "/tasks", body, Prefer="wait=30")
            yield await _counted("run", counter, lambda: here.must_answer(run, 201), times=RUNS)
            yield await _array(counter, here)


async def _array(counter: CallCounter, here: ServiceHere) -> Counted:
    """Count items from the middle of an array, since its first and last reports differ in size from the
    others."""
    last = ITEMS_BEFORE + ITEMS_COUNTED
    counts: list[CallCounts] = []
    items.at_item.update({ITEMS_BEFORE: counter.begin, last: lambda: counts.append(counter.end())})
    await _run_array(here, last + ITEMS_BEFORE)
    memory: list[Memory] = []

    def begin() -> None:
        gc.collect()
        tracemalloc.start(FRAMES)

    def end() -> None:
        peak = tracemalloc.get_traced_memory()[1]
        memory.append(Memory(live_by_process(), float(peak)))

    items.at_item.update({ITEMS_BEFORE: begin, last: end})
    await _run_array(here, last + ITEMS_BEFORE)
    [found], [kept] = counts, memory
    return _summed("item", found, kept, ITEMS_COUNTED, ITEMS_COUNTED)


async def _run_array(here: ServiceHere, count: int) -> None:
    run = {"entrypoint": "bench.cost.items:work_on"}
    body = {"run": run, "items": list(range(count)), "max_parallel": 1, "resources": {"cpu": 0.02}}
    array = await here.ask("POST", "/arrays", body)
    await asyncio.sleep(count * items.ITEM_SECONDS)  # requests for the state of the array would count as well
    ended = await here.wait_until(f"/arrays/{array['id']}", "state", "succeeded", "failed", "cancelled")
    if ended["state"] != "succeeded":
        raise RuntimeError(f"the array did not succeed: {json.dumps(ended)}")


async def inference(counter: CallCounter, loop: VirtualLoop, folder: Path) -> AsyncIterator[Counted]:
    """Count one proxied request with binary tensors to a model that its server has. The server answers at
    once."""
    at = folder / "model-server.sock"
    serving = begin_in(CLIENT, lambda: asyncio.start_unix_server(_answer_as_triton, at))
    server = await serving
    loop.serve_port_at(MODEL_PORT, at)
    triton = json.dumps({"servers": [{"name": "main", "http_url": f"http://127.0.0.1:{MODEL_PORT}"}]})
    async with service_here(folder, TRITON=triton, **SIMULATED) as here:
        tensor = {"name": "INPUT0", "shape": [1, TENSOR_BYTES // 4], "datatype": "FP32"}
        sized = {**tensor, "parameters": {"binary_data_size": TENSOR_BYTES}}
        head = json.dumps({"inputs": [sized], "parameters": {"binary_data_output": True}})
        request = here.encoded(
            "POST",
            "/v2/models/identity/infer",
            head,
            zeros=TENSOR_BYTES,
            Inference_Header_Content_Length=str(len(head)),
        )
        yield await _counted("proxied", counter, lambda: here.must_answer(request, 200))
    server.close()


async def _answer_as_triton(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    output = {"name": "OUTPUT0", "shape": [1, TENSOR_BYTES // 4], "datatype": "FP32"}
    sized = {**output, "parameters": {"binary_data_size": TENSOR_BYTES}}
    head = json.dumps({"model_name": "identity", "model_version": "1", "outputs": [sized]}).encode()
    about = f"Content-Length: {len(head) + TENSOR_BYTES}\r\nInference-Header-Content-Length: {len(head)}"
    tensor = f"HTTP/1.1 200 OK\r\n{about}\r\n\r\n".encode() + head + bytes(TENSOR_BYTES)
    while True:
        try:
            asked = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return
        named = asked.lower().partition(b"\r\ncontent-length:")[2]
        await reader.readexactly(int(named.partition(b"\r\n")[0] or 0))
        is_inference = b"/infer " in asked.partition(b"\r\n")[0]
        writer.write(tensor if is_inference else b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")


async def planning(counter: CallCounter, _loop: VirtualLoop, _folder: Path) -> AsyncIterator[Counted]:
    """Count the first plan of an empty cluster, per task that it starts, and cycles after one run has ended,
    on a small cluster of `bench plan`."""
    from bench.plan import Leader, a_cluster

    current_process.set(SERVICE)
    options, chance = Namespace(nodes=10, tasks=2000, demands=50), random.Random(42)
    leader = Leader(a_cluster(options, chance))
    counter.begin()
    leader.cycle()
    counts, started = counter.end(), len(leader.world.active)
    again = Leader(a_cluster(options, random.Random(42)))

    async def first() -> None:
        again.cycle()

    yield _summed("first_plan", counts, await measure_memory(first, 1), started, started)
    leader.settle()

    async def after_a_release() -> None:
        leader.pass_time(0.02)
        leader.release_one(chance)
        leader.cycle()

    yield await _counted("cycle", counter, after_a_release)


SCENES = {"tasks": tasks, "runs": runs, "inference": inference, "planning": planning}
