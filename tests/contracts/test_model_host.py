"""What the leader relies on of a server of models, asked of the one in memory."""

import asyncio

import pytest
from gpubroker_server.core.domain.units import DeviceKey, Mib, Seconds
from gpubroker_server.ports.models import HostFault, HostRefused, ModelState
from msgspec.structs import replace

from tests.simulated_host import SimulatedHost, SimulatedModel

SOON = Seconds(20.0)
REPOSITORY = (
    SimulatedModel("llm", Mib(4_000)),
    SimulatedModel("tokens", Mib(100)),
    SimulatedModel("chat", steps=("tokens", "llm")),
    SimulatedModel("broken", fails=HostRefused(HostFault.OUT_OF_MEMORY, "CUDA out of memory")),
    SimulatedModel("endless", load_seconds=Seconds(1e6)),
)


def new_host() -> SimulatedHost:
    return SimulatedHost("main", map(replace, REPOSITORY))


async def test_a_load_is_over_when_the_index_says_ready() -> None:
    host = new_host()
    assert (await host.index(SOON)).models["llm"].stage is ModelState.ABSENT
    await host.load("llm", (DeviceKey("c/n/gpu"),), SOON)
    assert (await host.index(SOON)).models["llm"].stage is ModelState.READY


async def test_loading_a_loaded_model_and_unloading_an_absent_one_are_no_faults() -> None:
    host = new_host()
    await host.load("llm", (), SOON)
    await host.load("llm", (), SOON)
    await host.unload("llm", SOON)
    await host.unload("llm", SOON)
    await host.unload("never heard of", SOON)
    assert host.ready == []


async def test_an_ensemble_comes_and_goes_with_its_steps() -> None:
    host = new_host()
    assert (await host.describe("chat", SOON)).steps == ("tokens", "llm")
    await host.load("chat", (), SOON)
    assert host.ready == ["chat", "llm", "tokens"]
    await host.unload("chat", SOON)
    assert host.ready == []


async def test_a_load_that_fails_says_why_and_so_does_the_index() -> None:
    host = new_host()
    with pytest.raises(HostRefused, match="CUDA") as refused:
        await host.load("broken", (), SOON)
    assert refused.value.fault is HostFault.OUT_OF_MEMORY
    assert (await host.index(SOON)).models["broken"].reason == "CUDA out of memory"


async def test_a_model_that_is_not_in_the_repository_is_not_found() -> None:
    with pytest.raises(HostRefused) as refused:
        await new_host().load("nothing", (), SOON)
    assert refused.value.fault is HostFault.NOT_FOUND


async def test_whether_a_load_that_took_too_long_was_done_is_unknown() -> None:
    host = new_host()
    with pytest.raises(HostRefused) as refused:
        await host.load("endless", (), Seconds(0.01))
    assert refused.value.fault is HostFault.UNKNOWN
    assert (await host.index(SOON)).models["endless"].stage is ModelState.LOADING
    await host.close()


async def test_a_model_with_a_request_that_does_not_end_stays_unloading() -> None:
    host = new_host()
    await host.load("llm", (), SOON)
    host.models["llm"].stuck = True
    await host.unload("llm", SOON)
    assert (await host.index(SOON)).models["llm"].stage is ModelState.UNLOADING
    assert host.used_mb == 4_000
    host.let_go("llm")
    assert (await host.index(SOON)).models["llm"].stage is ModelState.ABSENT


async def test_restarted_server_has_no_models_and_another_incarnation() -> None:
    host = new_host()
    await host.load("llm", (), SOON)
    before = await host.index(SOON)
    loading = asyncio.create_task(host.load("endless", (), SOON))
    await asyncio.sleep(0)
    host.restart()
    after = await host.index(SOON)
    assert after.incarnation != before.incarnation
    assert after.models["llm"].stage is ModelState.ABSENT
    with pytest.raises(HostRefused) as refused:
        await loading
    assert refused.value.fault is HostFault.UNKNOWN


async def test_a_server_that_is_away_is_not_reached_and_comes_back_as_it_was() -> None:
    host = new_host()
    await host.load("llm", (), SOON)
    host.go_away()
    for call in (host.load("llm", (), SOON), host.unload("llm", SOON), host.index(SOON)):
        with pytest.raises(HostRefused) as refused:
            await call
        assert refused.value.fault is HostFault.UNREACHABLE
    host.come_back()
    assert (await host.index(SOON)).models["llm"].stage is ModelState.READY


async def test_model_whose_process_was_killed_is_ready_but_does_not_answer() -> None:
    """It answers again once it was unloaded and loaded."""
    host = new_host()
    await host.load("llm", (), SOON)
    host.models["llm"].dead = True
    await host.load("llm", (), SOON)
    assert (await host.index(SOON)).models["llm"].stage is ModelState.READY
    assert not await host.answers("llm", SOON)
    await host.unload("llm", SOON)
    with pytest.raises(HostRefused):
        await host.answers("llm", SOON)
    await host.load("llm", (), SOON)
    assert await host.answers("llm", SOON)


async def test_server_that_sees_other_gpus_than_those_of_the_lease_loads_nothing() -> None:
    host = new_host()
    host.seen = ("gpu0", "gpu1")
    assert (await host.describe("llm", SOON)).seen == ("gpu0", "gpu1")
    with pytest.raises(HostRefused) as refused:
        await host.load("llm", (DeviceKey("c/n/gpu0"),), SOON)
    assert refused.value.fault is HostFault.OTHER_GPUS
    assert host.ready == []
    await host.load("llm", (DeviceKey("c/n/gpu0"), DeviceKey("c/n/gpu1")), SOON)
    assert host.ready == ["llm"]


async def test_a_model_is_tried_out_with_as_many_rows_as_it_takes() -> None:
    host = new_host()
    with pytest.raises(HostRefused) as refused:
        await host.most_rows("llm", SOON)
    assert refused.value.fault is HostFault.NOT_FOUND
    await host.load("llm", (), SOON)
    host.models["llm"].most_rows = 8
    assert await host.most_rows("llm", SOON) == 8
    await host.try_out("llm", 8, {}, SOON)
    with pytest.raises(HostRefused, match="<= 8") as refused:
        await host.try_out("llm", 9, {}, SOON)
    assert refused.value.fault is HostFault.FAILED
    host.models["llm"].dead = True
    with pytest.raises(HostRefused, match="is gone"):
        await host.try_out("llm", 8, {}, SOON)
