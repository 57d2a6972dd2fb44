"""How a run is stopped, and that Gone is said only when nothing of it is left."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from gpubroker_server.core.domain.orders import Checkpointed, Ended, Ending, Gone, Progressed, Started

from tests.contracts.executor_bench import GPU
from tests.e2e.ray_lab import Lab, eventually, is_there, marked_with

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_run_that_obeys_the_notice_is_stopped_and_resumes_where_it_was(lab: Lab) -> None:
    run = await lab.start("count_until_stopped", gpu_mb=1000)
    await lab.until(lambda: any(isinstance(report, Progressed) for report in run.reports))
    await run.stop(grace_seconds=20)
    ended = await run.first(Ended)
    assert ended.ending is Ending.STOPPED
    saved = await run.first(Checkpointed)
    again = await lab.start("resume", fence=2, task=run.order.task, resume_state=saved.data, shareable=True)
    assert (await again.result())["count"] > 0


async def test_a_run_that_returns_after_the_notice_has_succeeded(lab: Lab) -> None:
    run = await lab.start("finish_after_notice", shareable=True)
    await run.first(Started)
    await run.stop(grace_seconds=20)
    assert await run.result() == "finished anyway"


async def test_a_run_that_ignores_the_notice_is_killed_after_its_grace_period(lab: Lab) -> None:
    run = await lab.start("ignore_the_notice", gpu_mb=1000)
    started = await run.first(Started)
    await run.stop(grace_seconds=0.3)
    ended = await run.first(Ended)
    assert ended.ending is Ending.LOST
    assert ended.failure is not None
    assert "grace period of 0.3 s" in ended.failure.message
    assert ended.at - started.at >= 0.3
    await run.first(Gone)
    assert not is_there(started.pid)


async def test_a_command_gets_the_notice_as_sigterm(lab: Lab, tmp_path: Path) -> None:
    script = 'trap "echo going; exit 7" TERM; touch "$0"; while :; do sleep 0.05; done'
    listens = tmp_path / "listens"
    run = await lab.start(kind="command", command=("/bin/sh", "-c", script, str(listens)), arguments=b"")
    await eventually(listens.exists)
    await run.stop(grace_seconds=20)
    ended = await run.first(Ended)
    assert ended.ending is Ending.STOPPED
    assert ended.log_tail.startswith(b"going\n"), "standard error follows"


async def test_a_command_that_ignores_sigterm_is_killed_with_its_children(lab: Lab) -> None:
    script = "trap '' TERM; sleep 300 & wait"
    run = await lab.start(kind="command", command=("/bin/sh", "-c", script), arguments=b"")
    await run.first(Started)
    await eventually(lambda: len(marked_with(f"{run.order.task}:1")) == 2)
    await run.stop(grace_seconds=0)
    await run.first(Gone)
    assert marked_with(f"{run.order.task}:1") == []


async def test_gone_is_reported_after_the_last_process_of_a_run_has_ended(lab: Lab) -> None:
    run = await lab.start("leave_children_behind", gpu_mb=1000)
    processes = await run.result()
    await run.first(Gone)
    assert [name for name, pid in processes.items() if is_there(pid)] == []


async def test_the_children_of_a_killed_run_are_found_and_killed(lab: Lab) -> None:
    script = "setsid sleep 300 & kill -9 $PPID; wait"
    run = await lab.start(kind="command", command=("/bin/sh", "-c", script), gpu_mb=1000, arguments=b"")
    ended = await run.first(Ended)
    assert ended.ending is Ending.LOST
    await run.first(Gone)
    assert marked_with(f"{run.order.task}:1") == []
    assert run.order_of_kinds()[-2:] == ["Ended", "Gone"]


async def test_memory_is_measured_while_a_run_lives_and_free_in_its_gone_report(lab: Lab) -> None:
    run = await lab.start("ignore_the_notice", gpu_mb=1234)
    holder = f"{run.order.task}:1"
    await lab.until(
        lambda: any(sample.by_holder.get(holder) == 1234 for heard in lab.samples for sample in heard.samples)
    )
    await run.stop(grace_seconds=0)
    gone = await run.first(Gone)
    [sample] = [sample for sample in gone.samples if sample.device == GPU]
    assert (sample.used_mb, sample.by_holder) == (0, {})


async def test_a_run_with_a_killed_process_is_lost(lab: Lab) -> None:
    run = await lab.start("ignore_the_notice", gpu_mb=1000)
    started = await run.first(Started)
    os.kill(started.pid, signal.SIGKILL)
    ended = await run.first(Ended)
    assert (ended.ending, ended.failure and ended.failure.kind) == (Ending.LOST, "killed")
    assert (await run.first(Gone)).proof == "process_absent"


async def test_runs_that_share_a_process_with_a_killed_run_start_again(lab: Lab) -> None:
    deaf = await lab.start("ignore_the_notice", shareable=True)
    innocent = await lab.start("ignore_the_notice", shareable=True)
    assert (await deaf.first(Started)).pid == (await innocent.first(Started)).pid
    await deaf.stop(grace_seconds=0)
    assert (await deaf.first(Ended)).ending is Ending.LOST
    assert (await innocent.first(Ended)).ending is Ending.NEVER_STARTED
    await asyncio.gather(deaf.first(Gone), innocent.first(Gone))


async def test_run_that_may_have_crashed_a_shared_process_gets_its_own_next_time(lab: Lab) -> None:
    bystander = await lab.start("ignore_the_notice", shareable=True)
    await bystander.first(Started)
    culprit = await lab.start("crash", shareable=True)
    assert (await culprit.first(Ended)).ending is Ending.NEVER_STARTED
    assert (await bystander.first(Ended)).ending is Ending.NEVER_STARTED
    other = await lab.start("finish_after_notice", shareable=True)
    await other.first(Started)
    again = await lab.start("crash", shareable=True, task=culprit.order.task, fence=2)
    assert (await again.first(Ended)).ending is Ending.LOST
    await other.stop(grace_seconds=20)
    assert await other.result() == "finished anyway"
