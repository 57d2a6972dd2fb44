"""How a node agent leaves a head that has lost a process Ray needs."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from gpubroker.runtime.messages import RunKey, RunOutcome, checkpointed, ended
from gpubroker_server.adapters.ray.agent import node_agent
from gpubroker_server.adapters.ray.head.head import lost_file

from tests.contracts.fake_runners import FakeRunners, a_leader
from tests.patience import PATIENCE_SECONDS


async def test_agent_ends_only_when_the_last_checkpoint_of_a_run_is_received(
    runners: FakeRunners, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    key, keepalive = RunKey("counts", 1, 0), tmp_path / "keepalive"
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(node_agent, "WATCH_HEAD_SECONDS", 0.02)
    leader = a_leader(runners, tmp_path, keepalive=str(keepalive))
    await leader.announce()
    await leader.start("counts")
    await leader.until(lambda: runners.started == ["counts"])
    runner = runners.runner_of("counts")
    lost_file(keepalive).write_text("raylet", encoding="utf-8")
    await leader.until(lambda: any(item[0] == "stop" for item in runner.items))

    runner.report(checkpointed(key, 1, "abc", b"state", None), ended(key, RunOutcome("stopped"), b""))
    assert await asyncio.to_thread(runner.process.wait, PATIENCE_SECONDS) == -signal.SIGKILL
    looked_at = keepalive.stat().st_mtime_ns
    await leader.until(lambda: left or keepalive.stat().st_mtime_ns > looked_at + 100_000_000)
    assert left == []

    assert (await leader.receive("checkpointed"))[5] == 1
    acknowledging = asyncio.create_task(leader.receive("ended"))
    await leader.until(lambda: left)
    acknowledging.cancel()
    assert leader.kinds_of("counts") == ["checkpointed"]
