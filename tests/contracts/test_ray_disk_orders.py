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
from msgspec.structs import astuple

from tests.contracts.fake_runners import FakeRunners, Leader, a_leader
from tests.mounts import hung_mount
from tests.nvml.heard import next_node_sample
from tests.patience import PATIENCE_SECONDS

WEEK = Seconds(604_800.0)


def a_scratch(folder: Path) -> Path:
    """With an old log."""
    old = folder / "scratch" / "old.log"
    old.parent.mkdir()
    old.write_bytes(b"x")
    os.utime(old, (0, 10**9))
    return old.parent


async def test_a_busy_agent_refuses_looks_and_keeps_the_order_to_delete(tmp_path: Path) -> None:
    scratch, copies, told = a_scratch(tmp_path), tmp_path / "copies", asyncio.Queue[Report]()
    copies.mkdir()
    os.mkfifo(tmp_path / "goes on")
    status = (scratch / "old.log").stat()
    old = FoundFile(str(scratch), "old.log", FileClass.LOG, 1, status.st_mtime_ns, status.st_ino)
    sync = ("sh", "-c", f"read line < '{tmp_path}/goes on'")
    roots = (str(scratch), FileClass.LOG, (), 600.0), (str(copies), FileClass.REDUNDANT, sync)
    guard = DiskCleaner(tmp_path / "agent", told.put_nowait)
    for request, deletes, runs_sync in (("one", None, True), ("two", None, False), ("three", (old,), False)):
        guard.take((request, roots, (), 0.0, WEEK, deletes, runs_sync, (), 0.0))
    async with asyncio.timeout(PATIENCE_SECONDS):
        refused = await told.get()
        await asyncio.to_thread((tmp_path / "goes on").write_text, "now\n")
        looked, went = await told.get(), await told.get()
    assert (refused[2], "busy" in refused[6]) == ("two", True)
    for request, report in (("one", looked), ("three", went)):
        assert (report[2], [file[1] for file in report[3]], report[6]) == (request, ["old.log"], "")
    assert not (scratch / "old.log").exists()


async def test_disk_guard_answers_any_leader_but_deletes_only_for_the_latest(
    runners: FakeRunners, tmp_path: Path
) -> None:
    scratch = a_scratch(tmp_path)
    old = scratch / "old.log"
    leader = a_leader(runners, tmp_path)
    await leader.announce()
    root = WatchedRoot(str(scratch), FileClass.LOG)
    order = partial(DiskOrder, "r", (root,), (), 0.0, WEEK, node=NodeName("n1"))
    looks = order(runs_sync=True)
    await leader.order(*disk_order(looks))
    seen = await leader.receive("disk")
    assert [file[1] for file in seen[3]] == ["old.log"]
    deletes = order(deletes=tuple(FoundFile(*file) for file in seen[3]))
    leader.term = 0
    await leader.order(*disk_order(deletes))
    assert old.exists()
    leader.term = 1
    leader.received.clear()
    await leader.order(*disk_order(deletes))
    assert [file[1] for file in (await leader.receive("disk"))[3]] == ["old.log"]
    assert not old.exists()


@pytest.mark.evidence
async def test_a_root_that_hangs_holds_up_neither_the_agent_nor_other_roots(
    runners: FakeRunners, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Needs the right to mount. A real file system that does not answer; then its connection is gone."""
    monkeypatch.setattr(disk_cleaning, "ANSWER_SECONDS", 0.2)
    away, near = tmp_path / "away", a_scratch(tmp_path)
    leader = a_leader(runners, tmp_path, sample_period_seconds=0.05, watched_directories=(str(away),))
    roots = tuple(WatchedRoot(str(place), FileClass.LOG) for place in (away, near))
    order = disk_order(DiskOrder("r", roots, (), 0.0, WEEK, node=NodeName("n1")))
    with hung_mount(away) as server:
        await leader.announce()
        for _ in range(2):
            await leader.order(*order)
            told = await leader.receive("disk")
            assert told[6] == f"{away} does not answer and is left out"
            assert [file[1] for file in told[3]] == ["old.log"]
            leader.received.clear()
        await leader.start("run")
        await leader.until(lambda: "run" in runners.started)
        leader.received.clear()
        assert [disk.path for disk in (await next_node_sample(leader)).disks] == [runners.session.directory]
        server.close()
        while "left out" in (said := (await ask_again(leader, order))):
            pass
        assert str(away) in said
        assert "not connected" in said
    assert (await ask_again(leader, order)) == ""


@pytest.mark.evidence
async def test_a_root_that_begins_to_hang_in_a_pass_costs_that_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Needs the right to mount."""
    for limit in ("ANSWER_SECONDS", "PASS_SECONDS"):
        monkeypatch.setattr(disk_cleaning, limit, 0.2)
    copies, away, told = tmp_path / "copies", tmp_path / "away", asyncio.Queue[Report]()
    copies.mkdir()
    away.mkdir()
    os.mkfifo(tmp_path / "hung")
    sync = ("sh", "-c", f"echo > {tmp_path}/begun; read line < {tmp_path}/hung")
    near = WatchedRoot(str(a_scratch(tmp_path)), FileClass.LOG)
    slow = WatchedRoot(str(copies), FileClass.REDUNDANT, sync, Seconds(5.0))
    later = WatchedRoot(str(away), FileClass.LOG)
    guard = DiskCleaner(tmp_path / "agent", told.put_nowait)
    guard.take(("one", tuple(map(astuple, (near, slow, later))), (), 0.0, WEEK, None, True, (), 0.0))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (tmp_path / "begun").exists():  # noqa: ASYNC110  # a file is no event
            await asyncio.sleep(0.01)
        with hung_mount(away) as server:
            await asyncio.to_thread((tmp_path / "hung").write_text, "now\n")
            assert (await told.get())[6] == f"{away} did not answer within 5.2 s"
            monkeypatch.setattr(disk_cleaning, "PASS_SECONDS", PATIENCE_SECONDS)
            guard.take(("two", (astuple(near), astuple(later)), (), 0.0, WEEK, None, False, (), 0.0))
            report = await told.get()
            assert report[6] == f"{away} does not answer and is left out"
            assert [file[1] for file in report[3]] == ["old.log"]
            server.close()


async def ask_again(leader: Leader, order: tuple[Any, ...]) -> str:
    leader.received.clear()
    await leader.order(*order)
    message: str = (await leader.receive("disk"))[6]
    return message
