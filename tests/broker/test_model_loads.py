"""Loads at one server run beside one another, unless one of them would disturb the measuring of a size."""

import asyncio
from collections.abc import Coroutine, Sequence
from random import Random

import pytest
from gpubroker_server.broker.model_dispatch import LOADS_AT_ONCE, ModelDispatcher
from gpubroker_server.core.domain.leader_term import LeaderTerm
from gpubroker_server.core.domain.model_orders import LoadOrder, ModelState, ServerIndex
from gpubroker_server.core.domain.orders import Ended, Report
from gpubroker_server.core.domain.units import DeviceKey, Mib, MonotonicSeconds, Seconds, Term
from gpubroker_server.ports.models import HostFault, HostRefused
from msgspec.structs import replace

from tests.broker.stage import Hands
from tests.broker.test_model_desk import AT_ONCE, GPU, Desk, a_load, an_unload, running
from tests.simulated_host import SimulatedHost, SimulatedModel
from tests.simulation.timeline import Timeline
from tests.simulation.virtual_loop import Host, VirtualLoop

OTHER_GPU = DeviceKey("test/n1/gpu1")
ENDLESS = Seconds(1e6)


def sized(model: str, **fields: object) -> LoadOrder:
    return replace(a_load(model, model=model), sized=True, **fields)


def unmeasured(model: str, device: DeviceKey = GPU) -> LoadOrder:
    return replace(a_load(model, model=model), devices=((device, Mib(10)),))


async def test_a_quick_and_a_failing_load_end_beside_a_slow_one() -> None:
    desk = Desk(
        SimulatedModel("slow", load_seconds=ENDLESS),
        SimulatedModel("broken", fails=HostRefused(HostFault.FAILED, "no weights")),
        SimulatedModel("quick"),
    )
    async with running(desk):
        for model in ("slow", "broken", "quick"):
            desk.desk.send(sized(model))
        index = await desk.seen("quick", ModelState.READY)
        while ("broken", 1) in index.under_way:
            index = await desk.seen("quick", ModelState.READY)
        assert index.stage_of("slow") is ModelState.LOADING
        assert ("slow", 1) in index.under_way
        [ended] = [report for report in desk.told if isinstance(report, Ended)]
        assert ended.task == "broken"


async def test_a_model_is_unloaded_while_another_one_is_being_loaded() -> None:
    async with running(Desk(SimulatedModel("slow", load_seconds=ENDLESS), SimulatedModel("llm"))) as desk:
        desk.desk.send(sized("llm"))
        await desk.seen("llm", ModelState.READY)
        desk.desk.send(sized("slow"))
        desk.desk.send(an_unload())
        await desk.seen("llm", ModelState.ABSENT)


async def test_model_of_unmeasured_size_loads_alone_on_its_device_only() -> None:
    """It keeps no other device waiting."""
    models = [SimulatedModel(name) for name in ("known", "beside", "unknown")]
    desk = Desk(SimulatedModel("slow", load_seconds=ENDLESS), *models)
    async with running(desk):
        desk.desk.send(unmeasured("slow"))
        desk.desk.send(sized("known"))
        desk.desk.send(unmeasured("unknown"))
        desk.desk.send(unmeasured("beside", OTHER_GPU))
        index = await desk.seen("beside", ModelState.READY)
        while ("beside", 1) in index.under_way:
            index = await desk.seen("beside", ModelState.READY)
        assert desk.host.asked == [("load", "slow"), ("load", "beside")]
        assert {("known", 1), ("unknown", 1)} <= index.under_way


async def test_load_waits_for_an_unmeasured_one_of_another_server_on_its_device() -> None:
    hosts = [
        SimulatedHost("main", [SimulatedModel("slow", load_seconds=ENDLESS)]),
        SimulatedHost("other", [SimulatedModel("llm"), SimulatedModel("on_cpu")]),
    ]
    desk = Desk()
    desk.desk = ModelDispatcher(hosts, Hands(), lambda: desk.ticks, AT_ONCE)
    async with running(desk):
        desk.desk.send(unmeasured("slow"))
        desk.desk.send(sized("llm", server="other"))
        desk.desk.send(sized("on_cpu", server="other", devices=()))
        await desk.seen("on_cpu", ModelState.READY)
        assert hosts[1].asked == [("load", "on_cpu")]


async def test_a_server_gets_only_so_many_loads_at_once() -> None:
    names = [f"slow{n}" for n in range(LOADS_AT_ONCE)]
    desk = Desk(*(SimulatedModel(name, load_seconds=ENDLESS) for name in names), SimulatedModel("next"))
    async with running(desk):
        for name in (*names, "next"):
            desk.desk.send(sized(name))
        await desk.seen(names[-1], ModelState.LOADING)
        assert [model for _, model in desk.host.asked] == names
        desk.host.restart()
        await desk.seen("next", ModelState.READY)


async def test_loads_that_share_a_step_come_one_after_the_other() -> None:
    slow_step = SimulatedModel("step", load_seconds=Seconds(0.05))
    desk = Desk(slow_step, SimulatedModel("chain", steps=("step",)), SimulatedModel("quick"))
    async with running(desk):
        desk.desk.send(sized("step"))
        desk.desk.send(sized("chain", steps=("step",)))
        desk.desk.send(sized("quick"))
        await desk.seen("chain", ModelState.READY)
        assert desk.host.asked == [("load", "step"), ("load", "quick"), ("load", "chain")]


class LateHost(SimulatedHost):
    """Its index shows an unload a moment after the answer, as Triton's may."""

    async def unload(self, model: str, within_seconds: Seconds) -> None:
        asyncio.get_running_loop().call_later(0.01, self._late, super().unload(model, within_seconds))

    def _late(self, unload: Coroutine[None, None, None]) -> None:
        self._unloading = asyncio.ensure_future(unload)


@pytest.mark.parametrize("took_seconds", [0.3, 1.05, 60.0])
def test_end_of_an_unload_is_seen_soon_and_a_long_one_costs_few_looks(
    took_seconds: float,
) -> None:
    """It is seen a tenth late at most."""
    timeline = Timeline(0.0)
    loop = VirtualLoop(timeline, Host(timeline), Random(1))  # type: ignore[abstract]  # as much of a loop as is used
    host = LateHost("main", [SimulatedModel("llm", stuck=True)])
    gone_at: list[float] = []
    looks = 0

    def hear(reports: Sequence[Report]) -> None:
        nonlocal looks
        for report in reports:
            assert isinstance(report, ServerIndex)
            looks += report.stage_of("llm") is ModelState.UNLOADING
            if timeline.now() > 10.0 and report.stage_of("llm") is ModelState.ABSENT:
                gone_at.append(timeline.now())

    async def serve() -> None:
        dispatcher = ModelDispatcher([host], Hands(), lambda: MonotonicSeconds(timeline.now()))
        serving = asyncio.ensure_future(dispatcher.run(LeaderTerm(Term(1)), hear))
        dispatcher.send(a_load())
        await asyncio.sleep(10.0)
        dispatcher.send(an_unload())
        await asyncio.sleep(took_seconds)
        host.let_go("llm")
        await serving

    loop.create_task(serve())
    while not gone_at:
        timeline.step()
    loop.bury()
    assert gone_at[0] - (10.0 + took_seconds) <= min(0.1 * took_seconds, 0.25) + 0.02
    assert looks <= took_seconds / 0.25 + 40
