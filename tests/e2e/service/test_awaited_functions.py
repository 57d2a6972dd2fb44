"""Awaited calls of `async def` functions with the decorator `task`, at a real service."""

import pytest
from gpubroker import TaskFailed

from tests.e2e import remote_work
from tests.e2e.service_process import ServiceProcess
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.filterwarnings("ignore:await:FutureWarning")


@pytest.fixture(autouse=True)
def client_variables(service: ServiceProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUBROKER_DATA_DIR", str(service.data_dir))


async def test_an_awaited_call_runs_as_a_task_with_its_resources(service: ServiceProcess) -> None:
    made = await remote_work.add(20, 22)
    ran = service.broker.get(str(made["task"]))
    assert (made["sum"], ran.resources.cpu, ran.state) == (42, 0.1, "succeeded")


async def test_an_awaited_call_in_a_run_is_a_task_of_its_own(service: ServiceProcess) -> None:
    made = await remote_work.add_through_another(20, 22)
    assert made["sum"] == 42
    assert made["task"] != made["caller"]


async def test_runs_that_await_one_another_without_room_end(service: ServiceProcess) -> None:
    # Two GPUs: the third run of the chain finds none, and expires because the others keep theirs.
    queued = await remote_work.hold_and_await_another.submit(3)
    with pytest.raises(TaskFailed, match="TaskExpired"):
        service.broker.result(queued.id, timeout_seconds=PATIENCE_SECONDS)


async def test_submit_map_and_local_of_an_async_function(service: ServiceProcess) -> None:
    queued = await remote_work.add.submit(1, 2)
    assert service.broker.result(queued.id, timeout_seconds=PATIENCE_SECONDS)["sum"] == 3
    sums = [made["sum"] async for made in remote_work.add.map([1, 2], 10, max_parallel=1)]
    assert sums == [11, 12]
    with pytest.raises(Exception, match="no task runs here"):
        await remote_work.add.local(1, 2)
