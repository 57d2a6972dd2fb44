"""What may die around a run without harm to it: the driver, the line to Ray, the agent."""

import asyncio
import hashlib
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from gpubroker_server.adapters.ray.driver import link as driver_link
from gpubroker_server.core.domain.orders import Ended, Ending, Gone, NodeLost, NodeReport, Started
from gpubroker_server.ports.task_objects import ObjectWanted, WantedAnswer

from tests.contracts.executor_bench import Run
from tests.contracts.proxy import a_proxy
from tests.e2e.ray_lab import Lab, agents_of, command_lines, eventually, is_there

OpenLab = Callable[..., Awaitable[Lab]]

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def a_waiting_run(lab: Lab, tmp_path: Path) -> tuple[Run, Path]:
    """Running, and ending as soon as the file is made."""
    gate = tmp_path / "gate"
    run = await lab.start("wait_for_file", str(gate), gpu_mb=1000)
    await run.first(Started)
    return run, gate


async def next_answer(lab: Lab, before: int) -> NodeReport:
    seen = await lab.until(lambda: [n for n in lab.nodes[before:] if isinstance(n, NodeReport)])
    return seen[-1]


async def test_a_run_outlives_the_driver_process(lab: Lab, tmp_path: Path) -> None:
    run, gate = await a_waiting_run(lab, tmp_path)
    before = len(lab.nodes)
    [driver] = driver_pids(os.getpid())
    os.kill(driver, signal.SIGKILL)
    ordered_meanwhile = await lab.start("add", 1, 2, shareable=True)
    seen = await next_answer(lab, before)
    assert (run.order.task, 1, 0) in seen.runs
    assert (await ordered_meanwhile.first(Ended)).ending is Ending.NEVER_STARTED
    gate.touch()
    assert await run.result() == "seen"
    await run.first(Gone)


async def test_a_driver_that_hangs_takes_no_order_with_it_and_is_replaced(
    as_guest: str, open_lab: OpenLab, tmp_path: Path
) -> None:
    others = driver_pids(os.getpid())
    lab = await open_lab(address=as_guest, driver_patience_seconds=2.0)
    run, gate = await a_waiting_run(lab, tmp_path)
    before = len(lab.nodes)
    [driver] = set(driver_pids(os.getpid())) - set(others)
    os.kill(driver, signal.SIGSTOP)
    async with asyncio.timeout(1.0):
        ordered_meanwhile = await lab.start("add", "x" * 2**20, "y")
    assert (run.order.task, 1, 0) in (await next_answer(lab, before)).runs
    assert not is_there(driver)
    assert (await ordered_meanwhile.first(Ended)).ending is Ending.NEVER_STARTED
    gate.touch()
    assert await run.result() == "seen"


async def test_broken_or_silent_control_connection_is_replaced_and_harms_no_run(
    as_guest: str, open_lab: OpenLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the connection to the control service of Ray."""
    monkeypatch.setattr(driver_link, "KEEPALIVE_SECONDS", 1.0)
    host, port = as_guest.rsplit(":", 1)
    async with a_proxy(lambda: asyncio.open_connection(host, int(port))) as proxy:
        lab = await open_lab(address=f"127.0.0.1:{proxy.port}")
        run, gate = await a_waiting_run(lab, tmp_path)
        for strike in (proxy.reset, proxy.fall_silent):
            before = proxy.taken
            strike()
            meanwhile = await lab.start("add", 1, 2, shareable=True)
            assert await meanwhile.result() == 3
            await eventually(lambda: proxy.taken > before)  # noqa: B023  # called at once
        gate.touch()
        assert await run.result() == "seen"
        assert not [node for node in lab.nodes if isinstance(node, NodeLost)]


async def test_a_run_outlives_the_node_agent(lab: Lab, tmp_path: Path) -> None:
    run, gate = await a_waiting_run(lab, tmp_path)
    before = len(lab.nodes)
    [agent] = agents_of(lab.head)
    os.kill(agent, signal.SIGKILL)
    seen = await next_answer(lab, before)
    assert (run.order.task, 1, 0) in seen.runs
    assert not [node for node in lab.nodes[before:] if isinstance(node, NodeLost)]
    gate.touch()
    assert await run.result() == "seen"
    assert (await run.first(Gone)).proof == "process_absent"


async def test_run_keeps_its_object_although_node_agents_are_killed(lab: Lab, tmp_path: Path) -> None:
    data, gate = b"x" * 1_000_000 + b"!", tmp_path / "gate"
    named = {"object": hashlib.sha256(data).hexdigest()}
    run = await lab.start("last_byte_once_seen", named, str(gate))
    await run.first(ObjectWanted)
    [agent] = agents_of(lab.head)
    os.kill(agent, signal.SIGKILL)
    asked = await lab.until(lambda: [each for each in run.reports if isinstance(each, ObjectWanted)][1:])
    lab.executor.answer(WantedAnswer(run.order.node, asked[0], len(data), data, ""))
    await eventually(gate.with_suffix(".has").exists)
    before = len(lab.nodes)
    [agent] = agents_of(lab.head)
    os.kill(agent, signal.SIGKILL)
    await next_answer(lab, before)
    gate.touch()
    assert await run.result() == ord("!")


def driver_pids(parent: int) -> list[int]:
    """Driver processes of one service."""
    drivers = command_lines("gpubroker_server.adapters.ray.driver.process")
    return [pid for pid in drivers if f"PPid:\t{parent}\n" in Path(f"/proc/{pid}/status").read_text()]
