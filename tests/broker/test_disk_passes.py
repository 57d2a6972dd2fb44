"""What the leader asks a node about its disks, and what of it is in the audit log before anything goes."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from gpubroker_server.broker.disk_passes import GIVEN_UP_SECONDS, DiskPasses, local_paths
from gpubroker_server.core.control.disk_guard import DiskGuard, DiskRules
from gpubroker_server.core.domain.decisions import Decision, Request
from gpubroker_server.core.domain.device import (
    DiskOrder,
    DiskReport,
    DiskSample,
    FileClass,
    FoundFile,
    NodeSample,
    WatchedRoot,
)
from gpubroker_server.core.domain.orders import Checkpointed
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Fence, Instant, Mib, NodeName, Seconds, TaskId
from msgspec.structs import replace

from tests.broker.stage import a_stage
from tests.builders import GIB, NOW, a_device, a_node, a_world
from tests.memory_blobs import Blobs
from tests.patience import PATIENCE_SECONDS

N1 = NodeName("n1")
ROOT = WatchedRoot("/scratch", FileClass.LOG)
OLD = FoundFile("/scratch", "a/old.log", FileClass.LOG, 100, 1_000_000_000, 7)
AT = Instant(NOW)


class Scene:
    def __init__(self, guard: DiskGuard = DiskGuard(roots=(ROOT,), spared=("/data",))) -> None:  # noqa: B008
        self.world = a_world(a_node(), a_device())
        self.blobs = Blobs()
        self.guard = guard
        self.another_leader()

    def another_leader(self) -> DiskPasses:
        self.passes = DiskPasses(self.world, Policy(), self.guard, self.blobs)
        return self.passes

    def fill(self, used: float, at: float = NOW) -> None:
        disks = (DiskSample("/scratch", 100, round(100 - 100 * used)),)
        self.world.node_samples[N1] = NodeSample(N1, Instant(at), 0.0, Mib(1), Mib(1), disks=disks)

    def ask(self, what: str, node: str = "n1", **fields: object) -> None:
        self.world.requests["r"] = Request("r", TaskId(node), "lab", what, {"by": "ada", **fields}, AT)

    def order(self, now: Instant = AT) -> DiskOrder:
        return the_order(self.passes.carry_out(now))

    async def hear(
        self, request: str = "r", files: Sequence[FoundFile] = (OLD,), **about: object
    ) -> Decision:
        report = replace(DiskReport(N1, AT, request, tuple(files)), **about)
        [decision] = await self.passes.answered(report, AT)
        assert [decision] == await self.passes.answered(report, AT)  # the database refused it once
        return decision

    async def told(self, decision: Decision) -> dict[str, object]:
        assert decision.requests_done == ("r",)
        told: dict[str, object] = json.loads(await self.blobs.get(decision.answer))
        return told


def the_order(decisions: Sequence[Decision]) -> DiskOrder:
    [decision] = decisions
    [order] = decision.orders
    assert isinstance(order, DiskOrder)
    return order


async def test_a_look_runs_no_command_and_deletes_nothing() -> None:
    scene = Scene()
    scene.fill(0.66)
    scene.ask("disk")
    order = scene.order()
    assert (order.node, order.roots, order.spared, order.warn) == (N1, (ROOT,), ("/data",), 0.6)
    assert (order.runs_sync, order.deletes, order.above) == (False, None, 0.0)
    assert scene.passes.carry_out(AT) == []  # it is asked once
    told = await scene.told(await scene.hear(kept=(("young", 2),)))
    assert (told["deleted"], told["kept"]) == (False, {"young": 2})
    assert told["disks"] == [{"path": "/scratch", "total_bytes": 100, "free_bytes": 34, "level": "clean"}]
    assert told["files"] == [
        {"path": "/scratch/a/old.log", "class": "log", "size_bytes": 100, "modified_at": 1.0}
    ]


@pytest.mark.parametrize("fields", [{}, {"dry_run": True}])
async def test_cleaning_is_a_dry_run_unless_it_says_otherwise(fields: dict[str, Any]) -> None:
    scene = Scene()
    scene.ask("clean", **fields)
    assert scene.order().runs_sync
    assert (await scene.told(await scene.hear()))["deleted"] is False


async def test_each_file_is_in_the_audit_log_before_its_deletion_is_ordered() -> None:
    scene = Scene()
    scene.ask("clean", dry_run=False)
    scene.order()
    decision = await scene.hear(message="/other: missing", kept=(("open", 1),))
    [note] = decision.audit
    assert (note.tenant, note.actor, note.action) == ("lab", "ada", "disk.delete")
    assert (note.subject, note.reason) == ("n1:/scratch/a/old.log", "log, 100 bytes")
    assert not decision.is_empty()
    assert [(one.kind, one.fields) for one in decision.notices] == [
        ("fleet.DISK_CLEANED", {"files": 1, "bytes": 100})
    ]
    assert the_order([decision]).deletes == (OLD,)
    assert decision.requests_done == ()
    gone = await scene.hear(files=(), kept=(("open", 1),), at=Instant(NOW + 1))
    told = await scene.told(gone)
    assert (told["deleted"], told["files"], told["kept"]) == (True, [], {"open": 2})
    assert told["message"] == "/other: missing"


async def test_new_leader_says_where_the_deletions_of_the_last_one_are_listed() -> None:
    scene = Scene()
    scene.ask("clean", dry_run=False)
    scene.order()
    assert (await scene.hear()).audit
    scene.another_leader()
    assert scene.order(Instant(NOW + 1)).deletes is None
    told = await scene.told(await scene.hear(files=()))
    assert (told["deleted"], told["files"]) == (False, [])
    assert "is in the audit log" in str(told["message"])


async def test_the_first_pass_deletes_nothing_and_says_so() -> None:
    scene = Scene()
    scene.ask("clean", dry_run=False)
    scene.order()
    told = await scene.told(await scene.hear(is_first=True))
    assert (told["deleted"], told["first_pass"]) == (False, True)


async def test_a_request_that_no_agent_answers_and_one_for_no_node_are_settled() -> None:
    scene = Scene()
    scene.ask("disk", node="elsewhere")
    [decision] = scene.passes.carry_out(AT)
    assert (decision.requests_done, decision.orders) == (("r",), ())
    scene.ask("disk")
    scene.order()
    for passes in (scene.passes, scene.another_leader()):
        [decision] = passes.carry_out(Instant(NOW + GIVEN_UP_SECONDS + 1))
        assert (decision.requests_done, decision.answer, decision.orders) == (("r",), "", ())
    del scene.world.requests["r"]
    assert scene.passes.carry_out(AT) == []
    assert await scene.passes.answered(DiskReport(N1, AT, "r"), AT) == []


async def test_a_full_node_is_cleaned_unasked_and_not_too_often() -> None:
    scene = Scene(DiskGuard(roots=(ROOT,), clean_every_seconds=Seconds(600.0)))
    scene.fill(0.64, at=NOW - 2)
    assert scene.passes.due(Instant(NOW - 2)) == []
    scene.fill(0.65)
    assert scene.passes.due(Instant(NOW - 1)) == []  # samples are not looked at more often than they come
    order = the_order(scene.passes.due(AT))
    assert (order.runs_sync, order.deletes, order.above) == (True, None, 0.65)
    assert scene.passes.carry_out(AT) == []
    shown = await scene.hear(order.request, is_first=True)
    assert [(one.kind, one.key, one.fields) for one in shown.notices] == [
        ("fleet.DISK_DRY_RUN", "n1", {"files": 1, "bytes": 100})
    ]
    assert not shown.orders
    later = Instant(NOW + 599)
    scene.fill(0.65, at=later)
    assert scene.passes.due(later) == []
    later = Instant(NOW + 601)
    assert the_order(scene.passes.due(later)).request == order.request
    decision = await scene.hear(order.request)
    assert [note.actor for note in decision.audit] == ["settings"]
    assert await scene.passes.answered(DiskReport(N1, later, order.request, (OLD,)), later) == []


def test_nothing_is_cleaned_unasked_without_roots_or_by_an_old_sample() -> None:
    without = Scene(DiskGuard())
    without.fill(0.99)
    assert without.passes.due(AT) == []
    scene = Scene()
    scene.fill(0.99, at=NOW - 60)
    assert scene.passes.due(AT) == []


def test_a_node_may_have_rules_of_its_own() -> None:
    scene = Scene(DiskGuard(roots=(ROOT,), overrides={"node:n1": DiskRules(0.2, 0.3, 0.4)}))
    scene.fill(0.35)
    assert the_order(scene.passes.due(AT)).warn == 0.2


@pytest.mark.parametrize(
    ("uri", "paths"),
    [
        ("/ckpt/run#3/a?b/50%25/", {"/ckpt/run#3/a?b/50%25"}),
        ("file:///ckpt/a%20b/step-1/", {"/ckpt/a%20b/step-1", "/ckpt/a b/step-1"}),
        ("file://host/ckpt/run#3", {"/ckpt/run#3", "/ckpt/run"}),
        ("File:/ckpt", {"/ckpt"}),
        *((uri, set()) for uri in ("", "/", "file:///", "ckpt", "s3://bucket/x")),
    ],
)
def test_paths_are_taken_as_they_are_and_those_of_uris_also_unquoted(uri: str, paths: set[str]) -> None:
    assert local_paths(uri) == paths


async def test_the_order_names_where_checkpoints_of_live_tasks_lie(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        await stage.lead()
        for name, uri in (
            ("one", "file:///ckpt/a%20b/step-1/"),
            ("two", "s3://bucket/x"),
            ("three", "/ckpt/run#3"),
        ):
            await stage.submit(name, seconds=1e6, gpu_mb=GIB)
            await stage.turn()
            await stage.hear(Checkpointed(TaskId(name), Fence(1), AT, 1, "d", None, uri))
        await stage.store.request(Request("r", TaskId("n1"), "default", "disk", {"by": "ada"}, AT))
        await stage.turn()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while "r" in stage.world.requests:  # the look is beside the cycles
                await asyncio.sleep(0.01)
                await stage.turn()
        [order] = stage.executor.looked
        assert order.live == ("/ckpt/a b/step-1", "/ckpt/a%20b/step-1", "/ckpt/run#3")
