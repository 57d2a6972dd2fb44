"""What keeps tasks waiting, as a leader has made it so, is found by its cause."""

from pathlib import Path
from typing import Any

import pytest
from gpubroker_server.core.control.failing_gpus import FailingGpuRules
from gpubroker_server.core.control.findings.diagnose import FleetKnown, diagnose_fleet
from gpubroker_server.core.control.findings.finding import Finding, Severity
from gpubroker_server.core.control.fleet import FleetRules
from gpubroker_server.core.domain.decisions import Request
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import Ended, Ending, Failure, Gone
from gpubroker_server.core.domain.policy import CustomLimit
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import DeviceKey, Instant, TaskId

from tests.broker.stage import Stage, a_stage
from tests.builders import GIB

LONG = 1e6


def found(stage: Stage) -> dict[str, Finding]:
    """By kind."""
    assert stage.leader.fleet is not None
    known = FleetKnown(stage.executor.status(), has_leader=True, fleet=stage.leader.fleet.seen)
    return {one.kind: one for one in diagnose_fleet(stage.world, stage.policy, known, stage.clock.now())}


@pytest.mark.provokes("run-slots-used-up", "cpus-used-up", "limit-used-up")
@pytest.mark.parametrize(
    ("kind", "demand", "runs", "subject"),
    [
        ("run-slots-used-up", {}, 64, "n1"),
        ("cpus-used-up", {"cpu": 32.0}, 2, "n1"),
        ("limit-used-up", {"custom": {"licence": 1.0}}, 2, "licence"),
    ],
)
async def test_resource_used_up_beside_free_gpu_memory_is_found_until_a_run_ends(
    tmp_path: Path, kind: str, demand: dict[str, Any], runs: int, subject: str
) -> None:
    async with a_stage(tmp_path, custom_limits=(CustomLimit("licence", 2.0),)) as stage:
        for number in range(runs):
            await stage.submit(f"t{number}", seconds=LONG, **{"gpu_mb": GIB // 8, "cpu": 0.1, **demand})
        await stage.leader.cycle()
        await stage.turns_until(f"t{runs - 1}", TaskState.RUNNING)
        assert found(stage) == {}
        await stage.submit("waits", seconds=LONG, **{"gpu_mb": GIB // 8, "cpu": 0.1, **demand})
        await stage.leader.cycle()
        assert {one: it.subject for one, it in found(stage).items()} == {kind: subject}
        cancel = Request("r1", TaskId("t0"), "default", "cancel", {}, stage.clock.now())
        await stage.store.request(cancel)
        await stage.leader.cycle()
        await stage.turns_until("waits", TaskState.RUNNING)
        assert found(stage) == {}


@pytest.mark.provokes("slow-starts")
async def test_a_run_that_does_not_begin_within_half_a_minute_is_found(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        await stage.submit("t", seconds=LONG, gpu_mb=GIB)
        await stage.leader.cycle()
        assert (await stage.row("t")).state is TaskState.ADMITTED
        stage.clock.time = Instant(stage.clock.time + 29.0)
        assert found(stage) == {}
        stage.clock.time = Instant(stage.clock.time + 2.0)
        assert found(stage)["slow-starts"].evidence == {"runs": 1, "longest_seconds": 31.0}


@pytest.mark.provokes("gpu-fails-runs")
@pytest.mark.parametrize("close", [False, True])
async def test_gpu_on_which_runs_fail_at_once_is_found_and_closed_by_a_setting(
    tmp_path: Path, close: bool
) -> None:
    async with a_stage(tmp_path) as stage:
        stage.fleet_rules = FleetRules(failing_gpus=FailingGpuRules(times=3, close=close))
        await stage.lead()
        broken = DeviceKey("test/n1/gpu0")
        for number in range(3):
            task = await stage.submit(f"t{number}", name=f"program{number}", seconds=LONG, gpu_mb=GIB)
            await stage.leader.cycle()
            await stage.turns_until(task.id, TaskState.RUNNING)
            row = await stage.row(task.id)
            broken = stage.world.leases_of(row)[0].device
            failed = Ended(
                task.id, row.fence, stage.clock.now(), Ending.FAILED, failure=Failure("exception", "CUDA")
            )
            gone = Gone(task.id, row.fence, stage.clock.now(), Proof.PROCESS_ABSENT)
            await stage.hear(failed, gone)
        assert stage.leader.fleet is not None
        await stage.leader.fleet.look()
        await stage.leader.cycle()
        expected = {"gpu-closed": Severity.CRITICAL} if close else {"gpu-fails-runs": Severity.WARNING}
        assert {kind: one.severity for kind, one in found(stage).items()} == expected
        assert stage.world.ledgers[broken].device.is_closed is close
