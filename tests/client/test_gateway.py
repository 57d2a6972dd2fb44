"""The SDK against the real gateway, operation by operation."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import cloudpickle
import httpx
import pytest
from gpubroker import (
    AsyncBroker,
    Refused,
    ResultUnreadable,
    TaskFailed,
    TaskState,
    WaitTimeout,
    WrongArgument,
)
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.estimates import Observation, SketchKey, What
from gpubroker_server.core.domain.orders import Failure
from gpubroker_server.http.identity import EVERY_SCOPE

from tests.builders import a_sketch
from tests.gateway.harness import Gateway
from tests.gateway.test_run_logs import say
from tests.patience import PATIENCE_SECONDS


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with Gateway() as running:
        yield running


@pytest.fixture
async def broker(gateway: Gateway) -> AsyncIterator[AsyncBroker]:
    token = (await gateway.client("sdk")).headers["authorization"].removeprefix("Bearer ")
    transport = httpx.ASGITransport(gateway.app)
    async with AsyncBroker("http://127.0.0.1:8470", token, retry_seconds=0, transport=transport) as broker:
        yield broker


async def test_every_option_of_submit_arrives(broker: AsyncBroker) -> None:
    task = await broker.submit(
        "myteam.training:fit",
        "s3://data",
        kwargs={"epochs": 3},
        name="nightly",
        priority="batch",
        gpu_mb=1024,
        cpu=2,
        memory_mb=512,
        custom={"licence": 1.0},
        placement="spread",
        model_type="llm",
        labels={"run": "nightly"},
        env={"SEED": "1"},
        max_retries=2,
        timeout_seconds=60,
        grace_seconds=5,
        not_before=datetime.fromtimestamp(0, UTC),
        queue_ttl_seconds=3600,
        deadline_seconds=7200,
        expected_seconds=30,
    )
    assert (task.name, task.band, task.placement, task.model_type) == ("nightly", "batch", "spread", "llm")
    assert (task.max_retries, task.timeout_seconds, task.grace_seconds) == (2, 60, 5)
    assert (task.labels, task.run.entrypoint) == ({"run": "nightly"}, "myteam.training:fit")
    assert task.resources.gpu_mb == 1024
    assert task.submitted_at is not None
    assert task.expires_at == task.submitted_at + timedelta(hours=1)
    assert task.deadline_at == task.submitted_at + timedelta(hours=2)
    assert (task.not_before, task.expected_seconds) == (None, 30)
    assert (await broker.get(task)).run == task.run


async def test_tasks_to_run_after_are_given_as_tasks_or_by_their_ids(broker: AsyncBroker) -> None:
    first, second = [await broker.submit(["true"]) for _ in range(2)]
    last = await broker.submit(["true"], after=[first, second.id])
    assert [one.task for one in last.after] == [first.id, second.id]
    with pytest.raises(WrongArgument, match=r"write after=\[task\]"):
        await broker.submit(["true"], after=first.id)


async def test_commands_and_functions_arrive(broker: AsyncBroker) -> None:
    command = await broker.submit(["ls", "-l"], working_directory="/srv")
    assert (command.run.kind, command.run.command) == ("command", ("ls", "-l"))
    function = await broker.submit(lambda x: x + 1, 1)
    assert (function.run.kind, function.result_format) == ("function", "cloudpickle")


async def test_the_same_key_is_the_same_task(broker: AsyncBroker) -> None:
    first = await broker.submit("myteam.training:fit", idempotency_key="nightly")
    again = await broker.submit("myteam.training:fit", idempotency_key="nightly")
    assert first.id == again.id
    with pytest.raises(Refused) as refused:
        await broker.submit("myteam.training:fit", 1, idempotency_key="nightly")
    assert refused.value.code == "idempotency-key-reused"


async def test_a_refusal_names_what_is_wrong(broker: AsyncBroker) -> None:
    with pytest.raises(Refused) as refused:
        await broker.submit("myteam.training:fit", max_retries=1000)
    assert refused.value.code == "validation-failed"
    assert [error["pointer"] for error in refused.value.errors] == ["/max_retries"]
    with pytest.raises(Refused) as refused:
        await broker.submit("os:system", "ls")
    assert refused.value.code == "entrypoint-not-allowed"


async def test_results_come_back_unchanged(gateway: Gateway, broker: AsyncBroker) -> None:
    plain = await broker.submit("myteam.training:fit")
    with pytest.raises(WaitTimeout):
        await broker.wait(plain, timeout_seconds=0)
    await gateway.end(plain.id, b'{"accuracy": 0.9}', log_tail=b"epoch 3\n")
    assert (await broker.wait(plain)).state is TaskState.SUCCEEDED
    assert await broker.result(plain) == {"accuracy": 0.9}
    assert (await broker.outcome(plain)).log_tail == "epoch 3\n"

    pickled = await broker.submit(len, [1, 2])
    await gateway.end(pickled.id, cloudpickle.dumps({1, 2}), form="cloudpickle")
    assert await broker.result(pickled) == {1, 2}


class Foreign(Exception):
    """Like exceptions of many libraries: its pickle is opened with fewer arguments than it takes."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)


async def test_a_foreign_exception_in_a_result_comes_with_the_task(
    gateway: Gateway, broker: AsyncBroker
) -> None:
    task = await broker.submit(len, [1, 2])
    await gateway.end(task.id, cloudpickle.dumps(Foreign(7, "no luck")), form="cloudpickle")
    with pytest.raises(ResultUnreadable, match=rf"{task.id} cannot be opened here \(TypeError") as unreadable:
        await broker.result(task)
    assert (unreadable.value.source, type(unreadable.value.__cause__)) == (task.id, TypeError)


async def test_a_failure_comes_back_as_the_task_left_it(gateway: Gateway, broker: AsyncBroker) -> None:
    task = await broker.submit("myteam.training:fit")
    await gateway.end(task.id, failure=Failure("exception", "no luck", "Traceback ..."))
    with pytest.raises(TaskFailed) as failed:
        await broker.result(task)
    assert (failed.value.kind, failed.value.message, failed.value.traceback) == (
        "exception",
        "no luck",
        "Traceback ...",
    )


async def test_tasks_are_changed_and_cancelled(broker: AsyncBroker) -> None:
    task = await broker.submit("myteam.training:fit")
    assert (await broker.change(task, priority="interactive")).band == "interactive"
    assert (await broker.change(task, held=True)).held
    assert task.submitted_at is not None
    at = task.submitted_at + timedelta(hours=1)
    assert (await broker.change(task, not_before=at, queue_ttl_seconds=60)).not_before is not None
    assert (await broker.change(task, not_before=None)).not_before is None
    assert (await broker.cancel(task, reason="wrong data")).state is TaskState.CANCELLED


async def test_lists_are_filtered_and_paged(broker: AsyncBroker) -> None:
    for number in range(5):
        task = await broker.submit("myteam.training:fit", labels={"odd": str(number % 2)}, name=f"t{number}")
    found = [task.name async for task in broker.list(labels={"odd": "1"}, state=["pending"], limit=1)]
    assert found == ["t3", "t1"]
    assert [task.name async for task in broker.list(name="t4", min_priority=1)] == ["t4"]
    last = await broker.submit("myteam.training:fit", after=[task], name="last")
    assert [task.id async for task in broker.list(after=task)] == [last.id]
    assert [task async for task in broker.list(submitted_from=datetime(2020, 1, 1, tzinfo=UTC))] == []


async def test_a_waiting_task_is_explained(broker: AsyncBroker) -> None:
    task = await broker.submit("myteam.training:fit", gpu_mb=1024)
    explained = await broker.explain(task)
    assert explained.reason
    assert explained.message
    seen = await broker.get(task)
    assert seen.pending is not None
    assert seen.pending.reason == explained.reason


async def test_the_cluster_can_be_seen(gateway: Gateway, broker: AsyncBroker) -> None:
    task = await broker.submit("myteam.training:fit", gpu_mb=10 * 1024, name="fit")
    await gateway.admit(task.id)
    [gpu] = await broker.gpus()
    assert (gpu.leased_mb, gpu.free_mb + gpu.leased_mb + gpu.reserve_mb) == (10 * 1024, gpu.physical_mb)
    assert [(holder.name, holder.gpu_mb) for holder in gpu.holders] == [("fit", 10 * 1024)]
    [node] = await broker.nodes()
    assert (node.name, node.ready) == ("n1", True)
    stats = await broker.stats()
    assert (stats.tasks.running, stats.gpu.leased_mb) == (1, 10 * 1024)
    events = [event async for event in broker.events()]
    assert [event.position for event in events] == list(range(1, stats.position + 1))
    mine = [event.kind async for event in broker.events(task)]
    assert mine[:2] == ["task.submitted", "task.admitted"]


async def test_a_followed_log_of_the_first_worker_ends_with_that_worker(
    gateway: Gateway, broker: AsyncBroker
) -> None:
    array = await broker.submit_array("myteam.checks:verify", [1, 2], max_parallel=2)
    first, last = (worker.id for worker in array.workers)
    await gateway.end(first)
    await say(gateway, first, (0, b"one\n"))
    assert (await broker.get(array.id)).state == "running", "the other has yet to start"
    assert (await broker.get(array.id, worker=first)).state == "succeeded"
    with pytest.raises(Refused, match=f"{first}, {last}; choose one of them"):
        [line async for line in broker.logs(array.id)]
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert [line async for line in broker.logs(array.id, worker=first, follow=True)] == ["one\n"]
    told = [event.key async for event in broker.events(array.id) if event.kind == "task.submitted"]
    assert told == [first, last]


async def test_tokens_are_made_listed_and_revoked(broker: AsyncBroker) -> None:
    made = await broker.create_token("ci", scopes=["tasks:write"], max_priority=50, expires_in_seconds=60)
    assert made.token is not None
    assert made.token not in repr(made)
    listed = {token.name: token for token in await broker.tokens()}
    assert (listed["ci"].scopes, listed["ci"].max_priority) == (("tasks:write",), 50)
    assert listed["ci"].expires_at is not None
    assert listed["sdk"].scopes == (EVERY_SCOPE,)
    await broker.revoke_token("ci")
    assert "ci" not in [token.name for token in await broker.tokens()]


async def test_secrets_are_set_listed_and_deleted(gateway: Gateway, broker: AsyncBroker) -> None:
    await broker.set_secret("WANDB", "text with \u00fc")
    assert await gateway.secrets.read("default", ["WANDB"]) == {"WANDB": "text with \u00fc"}
    assert [secret.name for secret in await broker.secrets()] == ["WANDB"]
    await broker.delete_secret("WANDB")
    assert await broker.secrets() == ()


async def test_work_streams_are_put_signalled_drawn_and_deleted(broker: AsyncBroker) -> None:
    assert (await broker.put_stream("ladder", 3.0, reason="harder now")).weight == 3.0
    at = datetime(1970, 1, 2, tzinfo=UTC)
    told = await broker.signal_stream(
        "ladder", progress=1200, progress_at=at, data_age_seconds=60, quality=0.5
    )
    assert (told.progress, told.progress_at, told.quality) == (1200.0, at, 0.5)
    with pytest.raises(WrongArgument, match="progress_at has no time zone"):
        await broker.signal_stream("ladder", progress=1, progress_at=datetime(2020, 1, 1))  # noqa: DTZ001
    assert [stream.name for stream in await broker.streams()] == ["ladder", "nightly"]
    drawn = await broker.next_stream()
    assert (await broker.next_stream(seed=drawn.seed)).stream == drawn.stream
    await broker.delete_stream("ladder")
    assert [stream.name for stream in await broker.streams()] == ["nightly"]


async def test_readiness_and_shutdown(gateway: Gateway, broker: AsyncBroker) -> None:
    assert set((await broker.ready()).values()) == {"ok"}
    await broker.shutdown(stop_cluster=True)
    assert gateway.shutdowns == [True]


async def test_estimates_come_back(gateway: Gateway, broker: AsyncBroker) -> None:
    topic = SketchKey("default", "resnet", "H100", What.SECONDS)
    lesson = Observation(topic, 60.0, a_sketch([60.0]), gateway.clock.now())
    await gateway.commit(Decision("run", "ended", lessons=(lesson,)))
    [known] = (await broker.estimates("resnet")).items
    assert (known.subject, known.kind, known.gpu_mb) == ("resnet", "H100", None)
    assert known.seconds is not None
    assert (known.seconds.n, round(known.seconds.p50)) == (1, 60)
    assert (await broker.estimates("bert")).items == ()


async def test_simulations_and_plans_come_back(gateway: Gateway, broker: AsyncBroker) -> None:
    simulated = await broker.simulate("myteam.training:fit", gpu_mb=1024, priority=20)
    assert (simulated.verdict, simulated.starts, simulated.places[0].node) == ("starts", True, "n1")
    low = await broker.submit("myteam.training:fit", gpu_mb=60 * 1024, priority=20)
    await gateway.admit(low.id)
    gateway.clock.advance(1.0)
    bare = await broker.simulate(gpu_mb=40 * 1024, priority=60)
    assert (bare.verdict, [run.id for run in bare.victims]) == ("preempts", [low.id])
    assert bare.start is not None
    refused = await broker.simulate(gpu_mb=10**6)
    assert (refused.verdict, refused.starts) == ("refused", False)
    assert refused.refusal is not None
    assert refused.refusal.code == "exceeds-capacity"
    plan = await broker.plan([{"name": "one", "count": 2, "resources": {"gpu_mb": 30 * 1024}}])
    assert (plan.fits, plan.components[0].placed, [run.id for run in plan.displaced]) == (True, 2, [low.id])
    machine = {"name": "big", "cpu": 8, "gpus": [{"memory_mb": 1024, "count": 2}]}
    apart = await broker.plan([{"name": "one", "count": 3, "resources": {"gpus": 1}}], [machine])
    assert (apart.fits, apart.components[0].missing) == (False, 1)
    assert [task.id async for task in broker.list()] == [low.id]
