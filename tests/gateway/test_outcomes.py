"""The end of tasks: waiting, results, damage."""

import asyncio
import base64

import pytest
from gpubroker_server.core.domain.orders import Failure
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import TaskId

from tests.builders import GIB
from tests.gateway.harness import PATIENCE_SECONDS, Client, Gateway, before, fault, problem, until


async def test_a_wait_answers_as_soon_as_the_task_ends(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit()
    waiting = asyncio.create_task(api.get(f"/tasks/{task_id}/wait", params={"timeout_seconds": 60}))
    await gateway.waits(task_id)
    await gateway.end(task_id, b"[1, 2]")
    response = await before(PATIENCE_SECONDS, waiting)
    assert response.status_code == 200
    assert (response.json()["state"], response.json()["result"]) == ("succeeded", [1, 2])
    assert len(gateway.parts.waiters) == 0


async def test_a_wait_for_an_ended_task_answers_at_once(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit()
    await gateway.end(task_id)
    assert (await api.get(f"/tasks/{task_id}/wait")).status_code == 200


async def test_a_wait_that_is_over_answers_with_the_task(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit()
    for seconds in (0, 0.01):
        response = await api.get(f"/tasks/{task_id}/wait", params={"timeout_seconds": seconds})
        assert (response.status_code, response.json()["state"]) == (202, "pending")
    assert len(gateway.parts.waiters) == 0


async def test_many_wait_for_one_task(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit()
    waiting = [asyncio.create_task(api.get(f"/tasks/{task_id}/wait")) for _ in range(3)]
    await until(lambda: len(gateway.parts.waiters) == 3)
    await gateway.end(task_id)
    answers = await before(PATIENCE_SECONDS, asyncio.gather(*waiting))
    assert [answer.status_code for answer in answers] == [200, 200, 200]


async def test_a_preemption_does_not_end_a_wait(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit(resources={"gpu_mb": 60 * GIB}, priority=10)
    waiting = asyncio.create_task(api.get(f"/tasks/{task_id}/wait"))
    await gateway.waits(task_id)
    await gateway.admit(task_id)
    gateway.clock.advance(1)
    await gateway.plan(await api.submit(resources={"gpu_mb": 60 * GIB}, priority=90))
    await gateway.waits(task_id)
    assert not waiting.done()
    gateway.parts.waiters.wake_all()
    assert (await before(PATIENCE_SECONDS, waiting)).json()["state"] == "stopping"


async def test_a_stopping_service_answers_all_waits(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit()
    waiting = asyncio.create_task(api.get(f"/tasks/{task_id}/wait"))
    await gateway.waits(task_id)
    gateway.parts.waiters.wake_all()
    assert (await before(PATIENCE_SECONDS, waiting)).status_code == 202


@pytest.mark.parametrize("seconds", ["-1", "soon", "nan", "inf"])
async def test_an_invalid_timeout_is_refused(api: Client, seconds: str) -> None:
    task_id = await api.submit()
    fault(
        await api.get(f"/tasks/{task_id}/wait", params={"timeout_seconds": seconds}), "query:timeout_seconds"
    )


async def test_a_json_result_comes_as_a_value(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit()
    await gateway.end(task_id, b'{"a": [1, null, "\xc3\xa9"]}', log_tail=b"done \xff\n")
    assert (await api.get(f"/tasks/{task_id}/result")).json() == {
        "id": task_id,
        "state": "succeeded",
        "format": "json",
        "result": {"a": [1, None, "é"]},
        "error": None,
        "log_tail": "done \ufffd\n",
    }


async def test_a_pickled_result_comes_as_bytes(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit(result_format="cloudpickle")
    await gateway.end(task_id, b"\x80\x04N.", form="cloudpickle")
    outcome = (await api.get(f"/tasks/{task_id}/result")).json()
    assert base64.b64decode(outcome["data_base64"]) == b"\x80\x04N."
    assert "result" not in outcome
    waited = (await api.get(f"/tasks/{task_id}/wait")).json()
    assert waited["data_base64"] == outcome["data_base64"]


@pytest.mark.parametrize(
    "data", [b"NaN", b"[1, -Infinity]", b"{", b"\xff", b'1,"state":"failed"', b"", b"[" * 100_000]
)
async def test_a_result_that_only_claims_to_be_json_is_returned_as_bytes(
    gateway: Gateway, api: Client, data: bytes
) -> None:
    task_id = await api.submit()
    await gateway.end(task_id, data)
    outcome = (await api.get(f"/tasks/{task_id}/result")).json()
    assert base64.b64decode(outcome["data_base64"]) == data


async def test_a_large_result_is_fetched_from_its_blob(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit()
    await gateway.end(task_id, b'"' + b"x" * 500_000 + b'"')
    assert len(gateway.blobs.objects) == 1
    assert (await api.get(f"/tasks/{task_id}/result")).json()["result"] == "x" * 500_000


async def test_a_large_pickle_comes_whole(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit(result_format="cloudpickle")
    pickled = b"\x80\x04" + bytes(range(256)) * 8000
    await gateway.end(task_id, pickled, form="cloudpickle")
    outcome = (await api.get(f"/tasks/{task_id}/result")).json()
    assert base64.b64decode(outcome["data_base64"]) == pickled


async def test_a_result_whose_bytes_are_gone_is_reported_as_damaged(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit()
    await gateway.end(task_id, b'"' + b"x" * 500_000 + b'"')
    [digest] = gateway.blobs.objects
    await gateway.blobs.delete(digest)
    assert digest in problem(await api.get(f"/tasks/{task_id}/result"), 500, "result-damaged")["detail"]


async def test_a_failure_comes_with_its_traceback_and_its_log(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit()
    await gateway.end(
        task_id, failure=Failure("exception", "ValueError: x", "Traceback"), log_tail=b"step 1\n"
    )
    outcome = (await api.get(f"/tasks/{task_id}/result")).json()
    assert outcome["error"] == {"kind": "exception", "message": "ValueError: x", "traceback": "Traceback"}
    assert (outcome["state"], outcome["result"], outcome["log_tail"]) == ("failed", None, "step 1\n")
    task = (await api.get(f"/tasks/{task_id}")).json()
    assert task["error"]["kind"] == "exception"


async def test_a_task_that_never_ran_ends_without_a_result(api: Client) -> None:
    task_id = await api.submit()
    await api.post(f"/tasks/{task_id}/cancel")
    outcome = (await api.get(f"/tasks/{task_id}/result")).json()
    assert (outcome["state"], outcome["result"], outcome["error"]) == ("cancelled", None, None)
    assert (await api.get(f"/tasks/{task_id}/wait")).json()["result"] is None


async def test_the_result_of_a_running_task_is_refused_with_the_path_to_wait(api: Client) -> None:
    task_id = await api.submit()
    document = problem(await api.get(f"/tasks/{task_id}/result"), 409, "task-not-finished")
    assert f"/tasks/{task_id}/wait" in document["detail"]
    assert document["retryable"] is True


@pytest.mark.parametrize("is_gone", [True, False])
async def test_an_end_between_reading_and_waiting_is_not_missed(
    gateway: Gateway, api: Client, is_gone: bool
) -> None:
    task_id = await api.submit(resources={"gpu_mb": 1024})
    read_before = await gateway.store.record(TaskId(task_id))
    assert read_before is not None
    await gateway.end(task_id, is_gone=is_gone)
    records = gateway.parts.records
    ended = await before(2.0, records.at_its_end(read_before, 60))
    assert ended.task.state is TaskState.SUCCEEDED
