"""The leader and a server of models: loads and unloads that were committed first, and believed last."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from gpubroker_server.broker.model_dispatch import ModelDispatcher, ModelDispatchRules
from gpubroker_server.core.domain.decisions import Request
from gpubroker_server.core.domain.holders import Model
from gpubroker_server.core.domain.leader_term import LeaderTerm
from gpubroker_server.core.domain.model_orders import (
    CheckOrder,
    LoadOrder,
    ModelState,
    ServerIndex,
    UnloadOrder,
)
from gpubroker_server.core.domain.orders import Ended, Ending, Report
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import (
    DeviceKey,
    Fence,
    Instant,
    Mib,
    MonotonicSeconds,
    Seconds,
    TaskId,
    Term,
)
from gpubroker_server.ports.models import HostFault, HostRefused
from gpubroker_server.ports.store import AdmittedTask, RunSpec
from msgspec.structs import replace

from tests.broker.stage import Hands, a_stage
from tests.broker.stage import Stage as Scene
from tests.builders import GIB, NOW, a_task, check_ledger
from tests.simulated_host import SimulatedHost, SimulatedModel

AT_ONCE = ModelDispatchRules(
    Seconds(0.01), Seconds(0.01), gone_seconds=Seconds(0.05), drain_look_seconds=Seconds(0.01)
)
GPU = DeviceKey("test/n1/gpu0")


def a_load(task: str = "llm", fence: int = 1, server: str = "main", model: str = "llm") -> LoadOrder:
    return LoadOrder(TaskId(task), Fence(fence), server, model, ((GPU, Mib(10)),))


def an_unload(
    task: str = "llm", fence: int = 1, model: str = "llm", grace_seconds: float = 0.0
) -> UnloadOrder:
    return UnloadOrder(TaskId(task), Fence(fence), "main", model, Seconds(grace_seconds))


def a_check() -> CheckOrder:
    return CheckOrder(TaskId("llm"), Fence(1), "main", "llm", ((GPU, Mib(10)),))


class Desk:
    """A desk of one term, and what it tells."""

    def __init__(self, *models: SimulatedModel, wait_seconds: float = 0.0, is_let_go: bool = True) -> None:
        self.host = SimulatedHost("main", models)
        self.ticks = MonotonicSeconds(0.0)
        self.told: list[Report] = []
        self._read = 0
        self._news = asyncio.Event()
        self.is_let_go = is_let_go
        self.claims: set[str] = set()
        """Those that gateways were to let go of."""
        self.desk = ModelDispatcher(
            [self.host], Hands(), lambda: self.ticks, AT_ONCE, Seconds(wait_seconds), self._have_let_go
        )

    async def _have_let_go(self, claim: str) -> bool:
        self.claims.add(claim)
        return self.is_let_go

    def hear(self, reports: Sequence[Report]) -> None:
        self.told += reports
        self._news.set()

    async def next(self) -> Report:
        """Each once, in order."""
        while self._read == len(self.told):
            self._news.clear()
            await self._news.wait()
        self._read += 1
        return self.told[self._read - 1]

    async def carried_out(self) -> None:
        """An index from now on that was read while nothing was under way."""
        while not isinstance(report := await self.next(), ServerIndex) or report.under_way:
            pass

    async def seen(self, model: str, stage: ModelState) -> ServerIndex:
        """The first index from now on in which the model is there."""
        while True:
            report = await self.next()
            if isinstance(report, ServerIndex) and report.stage_of(model) is stage:
                return report


@asynccontextmanager
async def running(desk: Desk, until: float = 1e9) -> AsyncIterator[Desk]:
    run = asyncio.create_task(desk.desk.run(LeaderTerm(Term(1), MonotonicSeconds(until)), desk.hear))
    try:
        yield desk
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        await desk.host.close()


async def test_orders_to_a_server_are_carried_out_one_after_the_other() -> None:
    async with running(
        Desk(SimulatedModel("llm", load_seconds=Seconds(0.05)), SimulatedModel("bert"))
    ) as desk:
        desk.desk.send(a_load())
        desk.desk.send(a_load("bert", model="bert"))
        report = await desk.next()
        assert isinstance(report, ServerIndex)
        assert report.under_way == {("llm", 1), ("bert", 1)}
        await desk.seen("bert", ModelState.READY)
        assert desk.host.asked == [("load", "llm"), ("load", "bert")]
        assert desk.host.devices["llm"] == (GPU,)


async def test_reports_from_before_the_run_are_passed_on_when_it_begins() -> None:
    desk = Desk()
    desk.desk.send(replace(a_load(), server="gone"))
    async with running(desk):
        report = await desk.next()
        assert isinstance(report, Ended)
        assert report.task == "llm"


async def test_what_was_answered_is_no_longer_under_way() -> None:
    async with running(Desk(SimulatedModel("llm"))) as desk:
        desk.desk.send(a_load())
        while (await desk.seen("llm", ModelState.READY)).under_way:
            pass
        desk.desk.send(an_unload())
        while (await desk.seen("llm", ModelState.ABSENT)).under_way:
            pass


async def test_a_load_that_has_not_begun_is_taken_back_by_its_unload() -> None:
    first = SimulatedModel("bert", load_seconds=Seconds(0.05))
    async with running(Desk(first, SimulatedModel("llm"))) as desk:
        desk.desk.send(a_load("bert", model="bert"))
        desk.desk.send(a_load())
        desk.desk.send(an_unload())
        desk.desk.send(an_unload())
        await desk.seen("bert", ModelState.READY)
        assert ("load", "llm") not in desk.host.asked


async def test_the_same_order_twice_is_carried_out_once() -> None:
    async with running(Desk(SimulatedModel("llm", load_seconds=Seconds(0.05)))) as desk:
        for _ in range(2):
            desk.desk.send(a_load())
        await desk.next()
        desk.desk.send(a_load())
        while (await desk.seen("llm", ModelState.READY)).under_way:
            pass
        assert desk.host.asked == [("load", "llm")]


async def test_model_gateways_still_use_is_not_unloaded_while_others_are_loaded() -> None:
    async with running(Desk(SimulatedModel("llm"), SimulatedModel("bert"), is_let_go=False)) as desk:
        desk.desk.send(a_load())
        await desk.seen("llm", ModelState.READY)
        desk.desk.send(an_unload(grace_seconds=1e6))
        desk.desk.send(a_load("bert", model="bert"))
        report = await desk.seen("bert", ModelState.READY)
        assert ("llm", 1) in report.under_way
        assert desk.claims == {"llm:1"}
        assert desk.host.asked == [("load", "llm"), ("load", "bert")]
        desk.is_let_go = True
        await desk.seen("llm", ModelState.ABSENT)


async def test_gateways_are_waited_for_until_the_model_has_to_leave() -> None:
    async with running(Desk(SimulatedModel("llm"), is_let_go=False)) as desk:
        desk.desk.send(a_load())
        await desk.seen("llm", ModelState.READY)
        desk.desk.send(an_unload(grace_seconds=1e6))
        desk.desk.send(an_unload(grace_seconds=0.02))
        desk.desk.send(an_unload(grace_seconds=1e6))
        await desk.seen("llm", ModelState.ABSENT)
        assert desk.host.asked == [("load", "llm"), ("unload", "llm")]


@pytest.mark.parametrize("stuck", [False, True])
async def test_a_model_with_a_dead_process_is_unloaded_and_loaded_again(stuck: bool) -> None:
    """`stuck`: having asked a dead process its server never ends the unload, and loads it all the same."""
    async with running(Desk(SimulatedModel("llm", stuck=stuck))) as desk:
        desk.desk.send(a_load())
        await desk.seen("llm", ModelState.READY)
        desk.host.models["llm"].dead = True
        desk.desk.send(a_check())
        desk.desk.send(a_check())
        await desk.carried_out()
        assert desk.host.asked == [("load", "llm"), ("unload", "llm"), ("load", "llm")]
        assert desk.host.ready == ["llm"]


async def test_model_that_is_ready_is_not_loaded_again_as_a_second_copy() -> None:
    async with running(Desk(SimulatedModel("llm"))) as desk:
        desk.desk.send(a_load())
        await desk.seen("llm", ModelState.READY)
        desk.desk.send(a_load("another"))
        await desk.carried_out()
        assert desk.host.asked == [("load", "llm")]


async def test_model_that_answers_is_left_alone_and_a_leaving_one_is_not_asked() -> None:
    async with running(Desk(SimulatedModel("llm"), is_let_go=False)) as desk:
        desk.desk.send(a_load())
        await desk.seen("llm", ModelState.READY)
        desk.desk.send(a_check())
        await desk.carried_out()
        assert desk.host.asked == [("load", "llm")]
        desk.host.models["llm"].dead = True
        desk.desk.send(an_unload(grace_seconds=1e6))
        desk.desk.send(a_check())
        desk.is_let_go = True
        await desk.seen("llm", ModelState.ABSENT)
        await desk.carried_out()
        assert desk.host.asked == [("load", "llm"), ("unload", "llm")]


async def test_the_index_shows_that_a_checked_model_has_gone() -> None:
    async with running(Desk(SimulatedModel("llm"))) as desk:
        desk.desk.send(a_check())
        await desk.carried_out()
        assert (desk.host.asked, [report for report in desk.told if isinstance(report, Ended)]) == ([], [])


@pytest.mark.parametrize(
    ("fault", "ending"),
    [(HostFault.OUT_OF_MEMORY, Ending.FAILED), (HostFault.UNREACHABLE, Ending.NEVER_STARTED)],
)
async def test_a_load_that_is_refused_has_ended(fault: HostFault, ending: Ending) -> None:
    async with running(Desk(SimulatedModel("llm", fails=HostRefused(fault, "so it says")))) as desk:
        desk.desk.send(a_load())
        while not isinstance(report := await desk.next(), Ended):
            pass
        assert (report.task, report.fence, report.ending) == ("llm", 1, ending)
        if report.failure is not None:
            assert report.failure.message == "the server could not get the memory for it: so it says"


async def test_the_index_shows_the_result_of_a_load_without_an_answer() -> None:
    lost = SimulatedModel("llm", fails=HostRefused(HostFault.UNKNOWN, "the line broke"))
    async with running(Desk(lost)) as desk:
        desk.desk.send(a_load())
        while not isinstance(report := await desk.next(), ServerIndex) or report.under_way:
            pass
        assert not [report for report in desk.told if isinstance(report, Ended)]


async def test_an_order_for_a_server_that_is_no_longer_there_has_failed() -> None:
    async with running(Desk()) as desk:
        await desk.next()
        desk.desk.send(replace(a_load(), server="gone"))
        desk.desk.send(replace(an_unload(), server="gone"))
        [report] = [report for report in desk.told if isinstance(report, Ended)]
        assert report.failure is not None
        assert "add it to triton.servers" in report.failure.message


async def test_nothing_is_sent_once_the_term_is_over() -> None:
    async with running(Desk(SimulatedModel("llm")), until=5.0) as desk:
        desk.desk.send(a_load())
        await desk.seen("llm", ModelState.READY)
        desk.ticks = MonotonicSeconds(6.0)
        desk.desk.send(an_unload())
        desk.desk.send(a_load("other", model="llm"))
        while not isinstance(report := await desk.next(), ServerIndex) or report.under_way:
            pass
        assert desk.host.asked == [("load", "llm")]


async def test_a_new_leader_waits_for_what_an_older_one_has_sent() -> None:
    async with running(Desk(SimulatedModel("llm"), wait_seconds=0.05)) as desk:
        desk.desk.send(a_load())
        await asyncio.sleep(0)
        assert (desk.told, desk.host.asked) == ([], [])
        assert isinstance(await desk.next(), ServerIndex), "the index is read before anything is changed"


async def test_the_index_of_an_unreachable_server_is_read_again() -> None:
    desk = Desk(SimulatedModel("llm"))
    desk.host.go_away()
    async with running(desk):
        desk.desk.send(a_load())
        assert isinstance(await desk.next(), Ended)
        assert not [report for report in desk.told if isinstance(report, ServerIndex)]
        desk.host.come_back()
        assert isinstance(await desk.next(), ServerIndex)


class Served:
    """A leader on a stage, with one server of models behind it."""

    def __init__(self, scene: Scene, host: SimulatedHost) -> None:
        self.scene = scene
        self.host = host
        self._news = asyncio.Event()

    def hear(self, reports: Sequence[Report]) -> None:
        self.scene.leader.hear(reports)
        self._news.set()

    async def want(self, model: str, **fields: Any) -> None:
        facts = {"gpu_mb": 20 * GIB, "expires_at": Instant(NOW + 300.0), **fields}
        task = a_task(model, holder=Model("main", model), **facts)
        await self.scene.store.submit(AdmittedTask(task, RunSpec(kind="model")))

    async def until(self, id: str, state: TaskState, fence: int = 0) -> None:
        """Turns of the leader, each with what has come in meanwhile; the time limit of the test ends them."""
        scene = self.scene
        while True:
            scene.clock.time = Instant(scene.clock.time + 0.1)
            scene.executor.sample()
            await scene.turn()
            check_ledger(scene.world)
            row = await scene.row(id)
            if row.state is state and row.fence >= fence:
                return
            self._news.clear()
            await self._news.wait()


@asynccontextmanager
async def served(folder: Path, *models: SimulatedModel) -> AsyncIterator[Served]:
    host = SimulatedHost("main", models)
    async with a_stage(folder) as scene:
        stage = Served(scene, host)
        desk = ModelDispatcher([host], scene.clock, scene.clock.ticks, AT_ONCE)
        scene.use(desk)
        run = asyncio.create_task(desk.run(scene.leader.leader_term, stage.hear))
        try:
            yield stage
        finally:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
            await host.close()


async def test_a_wanted_model_is_loaded_and_an_idle_one_makes_room_for_a_task(tmp_path: Path) -> None:
    async with served(tmp_path, SimulatedModel("llm"), SimulatedModel("bert")) as stage:
        await stage.want("llm")
        await stage.want("bert")
        await stage.until("llm", TaskState.RUNNING)
        await stage.until("bert", TaskState.RUNNING)
        assert stage.host.ready == ["bert", "llm"]
        stage.scene.clock.time = Instant(NOW + 400.0)
        await stage.scene.submit("run", 1e6, gpu_mb=22 * GIB, gpus=2, priority=10)
        assert stage.scene.executor.measured == []
        await stage.until("run", TaskState.RUNNING)
        assert stage.host.ready == []
        assert set(stage.scene.executor.measured) == {"n1"}, "at once, when the models had left"


async def test_a_critical_model_stops_a_task_and_is_loaded_when_it_has_left(tmp_path: Path) -> None:
    async with served(tmp_path, SimulatedModel("llm")) as stage:
        await stage.scene.submit("run", 1e6, gpu_mb=22 * GIB, gpus=2, priority=20)
        await stage.until("run", TaskState.RUNNING)
        await stage.want("llm", priority=95)
        await stage.until("llm", TaskState.RUNNING)
        assert (await stage.scene.row("run")).state is TaskState.PENDING


async def test_memory_of_a_model_that_does_not_go_is_not_given_to_anybody(tmp_path: Path) -> None:
    async with served(tmp_path, SimulatedModel("llm", stuck=True)) as stage:
        await stage.want("llm", grace_seconds=Seconds(1.0))
        await stage.until("llm", TaskState.RUNNING)
        await stage.scene.store.request(Request("r1", TaskId("llm"), "default", "cancel", {}, NOW))
        await stage.until("llm", TaskState.FAILED)
        await stage.scene.submit("run", 1e6, gpu_mb=22 * GIB, gpus=2, priority=99)
        for _ in range(5):
            await stage.scene.later(1.0)
        assert (await stage.scene.row("run")).state is TaskState.PENDING
        stage.host.let_go("llm")
        await stage.until("run", TaskState.RUNNING)


async def test_a_restarted_server_loads_the_wanted_models_again(tmp_path: Path) -> None:
    async with served(tmp_path, SimulatedModel("llm")) as stage:
        await stage.want("llm")
        await stage.until("llm", TaskState.RUNNING)
        stage.host.restart()
        await stage.until("llm", TaskState.RUNNING, fence=2)
        assert stage.host.ready == ["llm"]
