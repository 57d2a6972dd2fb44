"""Memory is reported free only after it was measured."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE
from typing import Any, cast

import pytest
from gpubroker.runtime.journal import AT_ONCE
from gpubroker.runtime.messages import Report, RunKey, RunOrder, checkpointed, ended, failed, printed
from gpubroker_server.adapters.nvml.meter import DeviceMeter
from gpubroker_server.adapters.ray.agent.runs import NodeRuns
from gpubroker_server.adapters.ray.processes import has_stopped
from gpubroker_server.core.domain.orders import ReportedDevice
from gpubroker_server.core.domain.units import Mib
from gpubroker_server.ports.devices import DeviceReading, MeasuredDevice, ProcessGroup
from msgspec.structs import replace
from structlog.testing import capture_logs

from tests.contracts.fake_runners import GPU, FakeRunners, an_agent_config
from tests.full_disk import file_size_limit
from tests.patience import PATIENCE_SECONDS


class Probe:
    """Implements `ports.devices.DeviceProbe` of one device, which the test can silence."""

    name = "a GPU"

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self.is_on_the_bus = True
        self.asked = 0

    def read(self, holders: Mapping[str, ProcessGroup]) -> Sequence[DeviceReading]:
        self.asked += 1
        if self.fault is not None:
            raise self.fault
        used = Mib(sum(group.leased_mb[GPU] for group in holders.values()))
        measured = MeasuredDevice(GPU, used, Mib(0), {}, None) if self.is_on_the_bus else None
        return [DeviceReading(ReportedDevice(GPU, "sim", 0, Mib(1000), True), measured, "no answer")]


class Scene:
    """The runs of one node, and their reports."""

    def __init__(self, runners: FakeRunners, run_dir: Path) -> None:
        self.runners = runners
        self.probe = Probe()
        self.reports: list[Report] = []
        self.config = an_agent_config(run_dir, warm_runners=1)
        self.runs = NodeRuns(self.config, self.report, DeviceMeter([self.probe]), cast("Any", self.runners))

    def report(self, report: Report, _delay_seconds: float = AT_ONCE) -> None:
        self.reports.append(report)

    async def start(self, task: str, *devices: str, **more: Any) -> int:
        """The process that runs it."""
        leases = tuple((uuid, 1000) for uuid in devices)
        order = RunOrder(task=task, fence=1, kind="entrypoint", leases=leases, **more)
        self.runs.start(order, shareable=False)
        await self.until(lambda: task in self.runners.started)
        return self.runners.runner_of(task).process.pid

    async def until(self, true: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not true():  # noqa: ASYNC110  # processes send no events
                await asyncio.sleep(0.005)

    def gone(self) -> list[Report]:
        return [report for report in self.reports if report[0] == "gone"]


@pytest.fixture
async def scene(runners: FakeRunners, tmp_path: Path) -> Scene:
    scene = Scene(runners, tmp_path)
    await scene.runs.adopt()
    return scene


async def test_a_run_with_memory_is_gone_only_when_its_devices_can_be_measured(scene: Scene) -> None:
    await scene.start("t", GPU)
    scene.probe.fault = RuntimeError("the driver does not answer")
    scene.runners.runner_of("t").process.kill()
    await scene.until(lambda: scene.probe.asked >= 2)
    assert scene.gone() == []
    scene.probe.fault = None
    await scene.until(scene.gone)
    [(*_, proof, samples)] = scene.gone()
    assert (proof, samples) == ("process_absent", ((GPU, 0, 0, {}, None),))


async def test_a_run_is_not_gone_while_its_device_does_not_answer(scene: Scene) -> None:
    await scene.start("t", GPU)
    scene.probe.is_on_the_bus = False
    scene.runners.runner_of("t").process.kill()
    await scene.until(lambda: scene.probe.asked >= 2)
    assert scene.gone() == []
    scene.probe.is_on_the_bus = True
    await scene.until(scene.gone)


async def test_a_device_that_was_removed_from_the_machine_is_not_waited_for(scene: Scene) -> None:
    await scene.start("t", GPU, "GPU-taken-out")
    scene.runners.runner_of("t").process.kill()
    await scene.until(scene.gone)


async def test_a_run_without_memory_is_gone_without_a_measurement(scene: Scene) -> None:
    await scene.start("t")
    scene.probe.fault = RuntimeError("the driver does not answer")
    scene.runners.runner_of("t").process.kill()
    await scene.until(scene.gone)


TAKES_100_MB = "import sys; taken = b'x' * 10**8; print(len(taken), flush=True); sys.stdin.read()"
STARTS_ONE = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {TAKES_100_MB!r}])"


def a_large_process() -> "subprocess.Popen[bytes]":
    """It takes some megabytes itself, and a hundred in a process below it."""
    return subprocess.Popen([sys.executable, "-c", STARTS_ONE], stdin=PIPE, stdout=PIPE)


async def test_a_run_with_a_process_that_takes_too_much_host_memory_is_killed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scene.runs, "_config", replace(scene.config, process_memory_mb=64))
    await scene.runs.enforce_memory_limit()
    await scene.start("small")
    large = a_large_process()
    scene.runners.on_start = lambda runner: runner.become(large)
    await scene.start("large")
    assert large.stdout is not None
    await asyncio.to_thread(large.stdout.readline)
    await scene.runs.enforce_memory_limit()
    await scene.runs.enforce_memory_limit()
    await scene.until(scene.gone)
    [(_, task, *_, failure, _log)] = [report for report in scene.reports if report[0] == "ended"]
    assert (task, failure[0]) == ("large", "host_memory_exceeded")
    assert "and each may take 64 MiB here" in failure[1]


async def test_a_run_may_take_the_host_memory_that_it_asked_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scene.runs, "_config", replace(scene.config, process_memory_mb=64))
    large = a_large_process()
    scene.runners.on_start = lambda runner: runner.become(large)
    await scene.start("large", memory_mb=4000)
    assert large.stdout is not None
    await asyncio.to_thread(large.stdout.readline)
    await scene.runs.enforce_memory_limit()
    [run] = scene.runs.table.runs.values()
    assert run.process is not None
    assert run.process.breach == ""


async def test_run_that_gets_sigcont_while_it_is_being_killed_still_ends(
    scene: Scene,
) -> None:
    """An operator may continue every process of a node."""
    pid = await scene.start("t", GPU)
    held_up = threading.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))  # in which whatever ends it looks around
    loop.run_in_executor(None, held_up.wait, 10)
    scene.runs.stop(RunKey("t", 1, 0), grace_seconds=0)
    await scene.until(lambda: has_stopped(pid))
    os.kill(pid, signal.SIGCONT)
    await scene.until(lambda: not has_stopped(pid))
    held_up.set()
    await scene.until(scene.gone)


async def test_an_agent_that_leaves_a_node_leaves_no_process_and_no_file(
    scene: Scene, tmp_path: Path
) -> None:
    await scene.start("a", GPU)
    await scene.start("b")
    await scene.runs.close()
    assert scene.runners.names() == []
    assert os.listdir(tmp_path) == []


async def test_runs_of_a_shared_process_lose_output_on_a_full_disk_and_go_on(scene: Scene) -> None:
    for task in "ab":
        scene.runs.start(RunOrder(task=task, fence=1, kind="entrypoint"), shareable=True)
    await scene.until(lambda: len(scene.runners.started) == 2)
    runner = scene.runners.runner_of("a")
    assert scene.runners.runner_of("b") is runner
    key = RunKey("a", 1, 0)
    with capture_logs() as lines, file_size_limit(100):
        runner.report(*[printed(key, b"x" * 200, b"") for _ in range(3)])
        runner.report(checkpointed(key, 7, "abc", None, None))
        await scene.until(lambda: "checkpointed" in [report[0] for report in scene.reports])
    runner.report(printed(key, b"after\n", b""), ended(key, failed("exception", "no"), b""))
    await scene.until(scene.gone)
    assert runner.process.poll() is None
    assert [report for report in scene.reports if report[1] == "b"] == []
    assert [line["log_level"] for line in lines if "cannot be written" in line["event"]] == ["error"]
    kept = scene.runs.logs._files.log_of(key)
    assert kept.read_bytes() == b"x" * 100 + b"after\n"
