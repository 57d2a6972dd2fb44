"""The driver process: its environment, and what it asks of Ray's autoscaler."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
import ray.autoscaler.sdk
from gpubroker_server.adapters.ray.driver import link
from gpubroker_server.adapters.ray.driver.process import Driver, Opening
from gpubroker_server.adapters.ray.options import RayOptions
from gpubroker_server.adapters.ray.wire import read_frame
from gpubroker_server.core.domain.units import Fence, NodeName, Seconds, TaskId
from gpubroker_server.ports.worker_calls import WorkerCall, WorkerRun

from tests.contracts.test_ray_driver_link import SEEN, Bench, bench  # noqa: F401  # a fixture
from tests.e2e.service_process import until
from tests.patience import PATIENCE_SECONDS

FEW, MANY = [{"CPU": 1.0}], [{"CPU": 2.0, "GPU": 1.0}, {"CPU": 1.0}]


def test_driver_environment_names_the_joined_ray_and_not_the_services_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "other:6379")
    ours, theirs = socket.socketpair()
    with (
        ours,
        theirs,
        link._start_driver(RayOptions(tmp_path, address="head:6379"), "head:6379", theirs) as child,
    ):
        try:
            environ = Path(f"/proc/{child.pid}/environ")
            until(environ.read_bytes, "its environment is there")
            given = environ.read_bytes()
        finally:
            child.kill()
    assert [it for it in given.split(b"\0") if it.startswith(b"RAY_ADDRESS=")] == [b"RAY_ADDRESS=head:6379"]


async def test_an_order_waits_behind_one_call_to_a_worker_at_most(bench: Bench) -> None:  # noqa: F811
    driver = await bench.driver()
    driver.send_reports(SEEN)
    await bench.executor.reports()
    run, large = WorkerRun(NodeName("n1"), TaskId("w"), Fence(1)), b"x" * 2**22
    call = bench.executor.calls.call
    calls = [
        asyncio.create_task(call(run, WorkerCall("", "add", "json", large), Seconds(PATIENCE_SECONDS)))
        for _ in range(2)
    ]
    await asyncio.sleep(0)
    await bench.send("t")
    assert [(await driver.next(("call", "orders")))[0] for _ in range(3)] == ["call", "orders", "call"]
    for waiting in calls:
        waiting.cancel()


async def test_autoscaler_is_asked_again_after_a_failure_and_for_nothing_at_stop(
    bench: Bench,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    loop, heard = asyncio.get_running_loop(), asyncio.Event()

    def request_resources(*, bundles: Any) -> None:
        asked.append(bundles)
        loop.call_soon_threadsafe(heard.set)
        if bundles == FEW:
            raise ConnectionError("its head is away")

    monkeypatch.setattr(ray.autoscaler.sdk, "request_resources", request_resources)
    ours, theirs = socket.socketpair()
    _reader, writer = await asyncio.open_unix_connection(sock=ours)
    service = await bench.driver()
    with theirs:
        async with asyncio.TaskGroup() as tasks:
            driver = Driver(Opening("", "", "", "", 0, 1, 0), writer, tasks)
            asking = tasks.create_task(driver._request_resources())
            for bundles in (FEW, MANY):
                bench.executor.request_resources(bundles)
                heard.clear()
                await driver.on_message(await service.next("resources"))
                await asyncio.wait_for(heard.wait(), PATIENCE_SECONDS)
            closing = tasks.create_task(bench.executor.close(stop_cluster=False))
            await driver.on_message(await service.next("leave"))
            said, told = await asyncio.open_unix_connection(sock=theirs)
            assert await asyncio.wait_for(read_frame(said), PATIENCE_SECONDS) == ("left",)
            service.say("left")
            await closing
            asking.cancel()
            told.close()
        writer.close()
    assert asked == [FEW, MANY, []], "Ray would keep nodes for them for ever"
