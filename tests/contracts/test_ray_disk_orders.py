"""A node agent that is asked about its disks: one order at a time, of the present leader, and what hangs."""

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gpubroker.runtime.messages import Report
from gpubroker_server.adapters.ray.agent import disk_cleaning
from gpubroker_server.adapters.ray.agent.disk_cleaning import DiskCleaner
from gpubroker_server.adapters.ray.wire import disk_order
from gpubroker_server.core.domain.device import DiskOrder, FileClass, FoundFile, WatchedRoot
from gpubroker_server.core.domain.units import NodeName, Seconds

from tests.contracts.fake_runners import FakeRunners, Leader, a_leader
from tests.mounts import hung_mount
from tests.nvml.heard import next_node_sample

WEEK = Seconds(604_800.0)


def a_scratch(folder: Path) -> Path:
    """With an old log."""
    old = folder / "scratch" / "old.log"
    old.parent.mkdir()
    old.write_bytes(b"x")
    os.utime(old, (0, 10**9))
    return old.parent


async def test_the_agent_answers_one_question_at_a_time(tmp_path: Path) -> None:
    scratch = a_scratch(tmp_path)
    told: list[Report] = []
    answered = asyncio.Event()

    def tell(report: Report) -> None:
        told.append(report)
        if len(told) == 2:
            answered.set()

    guard = DiskCleaner(tmp_path / "agent", tell)
    for request in ("one", "two"):
        guard.take(
            (request, (tuple(WatchedRoot(str(scratch), FileClass.LOG)),), (), 0.0, WEEK, None, True, ())
        )
    await answered.wait()
    by_request = {report[2]: report for report in told}
    assert "busy" in by_request["two"][6]
    assert [file[1] for file in by_request["one"][3]] == ["old.log"]


async def test_the_disk_guard_answers_the_leader_and_deletes_only_for_the_present_one(
    runners: FakeRunners, tmp_path: Path
) -> None:
    scratch = a_scratch(tmp_path)
    old = scratch / "old.log"
    leader = a_leader(runners, tmp_path)
    await leader.announce()
    order = partial(DiskOrder, NodeName("n1"), "r", (WatchedRoot(str(scratch), FileClass.LOG),), (), 0.0)
    looks = order(WEEK, runs_sync=True)
    await leader.order(*disk_order(looks))
    seen = await leader.receive("disk")
    assert [file[1] for file in seen[3]] == ["old.log"]
    deletes = order(WEEK, deletes=tuple(FoundFile(*file) for file in seen[3]))
    leader.term = 0
    await leader.order(*disk_order(deletes))
    assert old.exists()
    leader.term = 1
    leader.received.clear()
    await leader.order(*disk_order(deletes))
    assert [file[1] for file in (await leader.receive("disk"))[3]] == ["old.log"]
    assert not old.exists()


@pytest.mark.evidence
async def test_a_root_that_hangs_holds_up_no_agent_and_is_given_up_in_time(
    runners: FakeRunners, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Needs the right to mount. A real file system that does not answer; then its connection is gone."""
    monkeypatch.setattr(disk_cleaning, "PASS_SECONDS", 0.2)
    away = tmp_path / "away"
    leader = a_leader(runners, tmp_path, sample_period_seconds=0.05, watched_directories=(str(away),))
    order = disk_order(
        DiskOrder(NodeName("n1"), "r", (WatchedRoot(str(away), FileClass.LOG),), (), 0.0, WEEK)
    )
    with hung_mount(away) as server:
        await leader.announce()
        for said in ("did not answer within", "busy"):
            await leader.order(*order)
            assert said in (await leader.receive("disk"))[6]
            leader.received.clear()
        await leader.start("run")
        await leader.until(lambda: "run" in runners.started)
        leader.received.clear()
        assert [disk.path for disk in (await next_node_sample(leader)).disks] == [runners.session.directory]
        server.close()
        while "busy" in (said := (await ask_again(leader, order))):
            pass
        assert str(away) in said
        assert "not connected" in said
    assert (await ask_again(leader, order)) == ""


async def ask_again(leader: Leader, order: tuple[Any, ...]) -> str:
    leader.received.clear()
    await leader.order(*order)
    message: str = (await leader.receive("disk"))[6]
    return message
