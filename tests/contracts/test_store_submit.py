"""What comes in: tasks, idempotency keys, requests."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from gpubroker.wire.forecasts import Sizing
from gpubroker_server.core.domain.decisions import Decision, Request, write_move
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.holders import INFERENCE, Model
from gpubroker_server.core.domain.models import ModelUsage
from gpubroker_server.core.domain.submission import BatchSubmission, ItemTerms, SeatTerms
from gpubroker_server.core.domain.task import Dependency, Move, OnFailure, Task
from gpubroker_server.core.domain.units import Instant, Mib, Position, TaskId
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.payload import read_task
from gpubroker_server.ports.store import AdmittedTask, RunSpec, SubmitVerdict, TaskFilter, TaskStore

from tests.builders import GIB, NOW, a_task
from tests.contracts.scenes import a_submission, log_of, next_term


async def test_what_was_submitted_reads_back_as_it_was(store: TaskStore) -> None:
    task = a_task(
        "t1", tenant="lab", name="train", priority=71, gpu_mb=2048, cpu=2.5, custom={"slots": 2.0},
        max_retries=3, timeout_seconds=60.0, grace_seconds=5.0, not_before=Instant(NOW + 9),
        held=True,
        expires_at=Instant(NOW + 60), queue_ttl_seconds=60.0,
        awaits=True,
        after=(Dependency(TaskId("t0")), Dependency(TaskId("ü"), OnFailure.IGNORE)),
        deadline_at=Instant(NOW + 90), expected_seconds=30.0,
        subject="llm",
    )  # fmt: skip
    spec = RunSpec(
        kind="function", entrypoint="a:b", command=("echo", "ü"), arguments=b"\x80\x00\xff",
        arguments_digest="ab" * 32, python="3.11", objects=("cd" * 32,), env={"A": "1"},
        result_format="cloudpickle", labels={"team": "vision", "run": "7"}, model_type="llm",
        working_directory="/srv",
        sizing=Sizing(9420, 8192, 12, "H100", "ü"),
    )  # fmt: skip
    await store.submit(AdmittedTask(task, spec, "key", "hash"))
    record = await store.record(task.id)
    assert record is not None
    assert (record.task, record.spec) == (task, spec)
    assert record.failure is None


async def test_the_first_event_of_a_task_carries_all_of_it(store: TaskStore) -> None:
    task = a_task("t1", cpu=1.0)
    await store.submit(a_submission(task))
    [event] = await log_of(store)
    assert (event.position, event.kind, event.key, event.version) == (1, "task.submitted", "t1", 1)
    assert event.fields["name"] == "t1"
    assert event.fields["demand"] == {"cpu": 1.0}


async def test_the_same_key_and_body_answer_with_the_first_task(store: TaskStore) -> None:
    await store.submit(a_submission("t1", key="k"))
    again = await store.submit(a_submission("t2", key="k"))
    assert (again.verdict, again.task) == (SubmitVerdict.DUPLICATE, "t1")
    assert await store.record(TaskId("t2")) is None
    assert len(await log_of(store)) == 1


async def test_the_same_key_with_another_body_stores_nothing(store: TaskStore) -> None:
    await store.submit(a_submission("t1", key="k"))
    reused = await store.submit(a_submission("t2", key="k", body="other"))
    assert (reused.verdict, reused.task) == (SubmitVerdict.KEY_REUSED, "t1")
    assert await store.record(TaskId("t2")) is None
    assert await store.specs([TaskId("t2")]) == {}


async def test_a_key_belongs_to_its_tenant(store: TaskStore) -> None:
    await store.submit(a_submission(a_task("t1", tenant="lab"), key="k"))
    other = await store.submit(a_submission(a_task("t2", tenant="web"), key="k"))
    assert (other.verdict, other.task) == (SubmitVerdict.ACCEPTED, "t2")


async def test_tasks_without_a_key_are_never_duplicates(store: TaskStore) -> None:
    outcomes = [await store.submit(a_submission(name)) for name in ("t1", "t2")]
    assert [outcome.verdict for outcome in outcomes] == [SubmitVerdict.ACCEPTED] * 2


async def test_a_repeated_commit_of_one_submission_is_harmless(store: TaskStore) -> None:
    submission = a_submission("t1")
    first, second = await store.submit(submission), await store.submit(submission)
    assert first == second
    assert first.verdict is SubmitVerdict.ACCEPTED
    assert len(await log_of(store)) == 1


async def test_of_many_with_one_key_at_the_same_time_exactly_one_is_accepted(store: TaskStore) -> None:
    names = [f"t{n:02}" for n in range(20)]
    outcomes = await asyncio.gather(*(store.submit(a_submission(name, key="k")) for name in names))
    accepted = [outcome for outcome in outcomes if outcome.verdict is SubmitVerdict.ACCEPTED]
    assert len(accepted) == 1
    assert {outcome.task for outcome in outcomes} == {accepted[0].task}
    assert len(await log_of(store)) == 1


async def test_duplicates_do_not_disturb_others_in_their_group(store: TaskStore) -> None:
    await store.submit(a_submission("first", key="k"))
    group = [a_submission(f"t{n:02}", key="k" if n % 3 == 0 else f"k{n}") for n in range(12)]
    outcomes = await asyncio.gather(*(store.submit(submission) for submission in group))
    expected = [SubmitVerdict.DUPLICATE if n % 3 == 0 else SubmitVerdict.ACCEPTED for n in range(12)]
    assert [outcome.verdict for outcome in outcomes] == expected
    assert len(await log_of(store)) == 1 + 8


async def test_only_new_tasks_are_submitted(store: TaskStore) -> None:
    with pytest.raises(ValueError, match="version 2"):
        await store.submit(a_submission(a_task("t1", version=2)))
    assert await log_of(store) == []


async def test_positions_have_no_gap_and_listeners_hear_each_once(store: TaskStore) -> None:
    heard: list[Event] = []
    store.listen(heard.extend)
    await asyncio.gather(*(store.submit(a_submission(f"t{n:03}", key=f"k{n % 40}")) for n in range(60)))
    log = await log_of(store)
    assert [event.position for event in log] == list(range(1, 41))
    assert heard == log
    assert await store.head() == 40


async def test_listeners_hear_of_a_task_before_its_submit_returns(store: TaskStore) -> None:
    heard: set[str] = set()

    def listen(events: Sequence[Event]) -> None:
        heard.update(event.key for event in events)

    store.listen(listen)

    async def submit(name: str) -> bool:
        await store.submit(a_submission(name))
        return name in heard

    assert all(await asyncio.gather(*(submit(f"t{n:02}") for n in range(30))))


async def test_a_cancelled_submit_does_not_cancel_others(store: TaskStore) -> None:
    leaving = asyncio.create_task(store.submit(a_submission("t1")))
    staying = asyncio.create_task(store.submit(a_submission("t2")))
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await staying).verdict is SubmitVerdict.ACCEPTED
    assert await store.record(TaskId("t2")) is not None


def a_cancel(id: str = "r1", task: str = "t1") -> Request:
    return Request(id, TaskId(task), "default", "cancel", {"grace_seconds": 5.0}, Instant(NOW))


async def test_a_request_waits_for_the_leader_until_it_is_done(store: TaskStore) -> None:
    await store.submit(a_submission("t1"))
    await store.request(a_cancel())
    assert list((await store.snapshot()).requests) == [a_cancel()]
    made = (await log_of(store))[-1]
    assert (made.kind, made.key, made.tenant, made.fields["task"]) == ("request.made", "r1", "default", "t1")


async def test_a_repeated_request_is_one_request(store: TaskStore) -> None:
    await store.request(a_cancel())
    await store.request(a_cancel())
    assert len((await store.snapshot()).requests) == 1
    assert len(await log_of(store)) == 1


async def test_events_are_read_from_a_position_and_up_to_a_number(store: TaskStore) -> None:
    for n in range(5):
        await store.submit(a_submission(f"t{n}"))
    assert [event.position for event in await store.events(Position(2), 2)] == [3, 4]
    assert await store.events(Position(5), 10) == []


async def test_a_demand_of_every_kind_survives(store: TaskStore) -> None:
    demands = [
        Demand(),
        Demand(gpus=8),
        Demand(gpus=1, gpu_fraction=0.25, cpu=0.5, memory_mb=Mib(512)),
        Demand(gpus=2, gpu_mb=Mib(1024), exclusive=True, placement="spread"),
        Demand(custom=(("a", 1.0), ("b", 2.5))),
    ]
    tasks: list[Task] = [a_task(f"t{n}", demand=demand) for n, demand in enumerate(demands)]
    for task in tasks:
        await store.submit(a_submission(task))
    rows = {task.id: task for task in (await store.snapshot()).tasks}
    assert [rows[task.id].demand for task in tasks] == demands


def a_model(id: str, server: str = "main", **terms: Any) -> Task:
    return a_task(id, gpu_mb=10 * GIB, holder=Model(server, "llm", **terms))


async def test_a_model_reads_back_with_its_terms(store: TaskStore) -> None:
    usage = ModelUsage(Instant(NOW), (1.0, 2.5, 3.0, 4.0))
    asked: dict[str, Any] = {"asked_priority": 70, "asked_at": Instant(NOW), "queued": True}
    told: dict[str, Any] = {"load_seconds": 4.5, "usage": usage, "steps": ("a", "b"), "versions": ("1", "3")}
    task = a_model("m1", pinned=True, **asked, **told)
    await store.submit(a_submission(task))
    record = await store.record(task.id)
    assert record is not None
    assert record.task == task
    [event] = await log_of(store)
    assert (read_task(event.payload), (await store.snapshot()).tasks) == (task, [task])


async def test_of_each_model_of_a_server_there_is_one_holder_at_a_time(store: TaskStore) -> None:
    assert (await store.submit(a_submission(a_model("m1")))).verdict is SubmitVerdict.ACCEPTED
    second = await store.submit(a_submission(a_model("m2")))
    assert (second.verdict, second.task) == (SubmitVerdict.DUPLICATE, "m1")
    assert await store.record(TaskId("m2")) is None
    assert (await store.submit(a_submission(a_model("m3", "other")))).verdict is SubmitVerdict.ACCEPTED
    term = await next_term(store)
    over = write_move(a_model("m1"), Move.CANCELLED, finished_at=NOW)
    await store.commit(term, [Decision("m1", "cancel", tasks=(over,))])
    assert (await store.submit(a_submission(a_model("m4")))).verdict is SubmitVerdict.ACCEPTED


async def test_of_many_submits_for_a_model_one_creates_its_holder(store: TaskStore) -> None:
    asked = [store.submit(a_submission(a_model(f"m{n}"))) for n in range(5)]
    plain = store.submit(a_submission("t1"))
    *outcomes, other = await asyncio.gather(*asked, plain)
    first = {outcome.task for outcome in outcomes}
    assert len(first) == 1
    assert [outcome.verdict for outcome in outcomes].count(SubmitVerdict.ACCEPTED) == 1
    assert other.verdict is SubmitVerdict.ACCEPTED


async def test_what_a_task_is_told_of_its_specification_reads_back(store: TaskStore) -> None:
    told: dict[str, Any] = {
        "roles": ("a", "b"),
        "profile": "scorer",
        "max_concurrency": 3,
        "retry_of": TaskId("old"),
    }
    terms: dict[str, Any] = {
        "items": ItemTerms(TaskId("t1"), 1, 9.0),
        "seat": SeatTerms(TaskId("t1"), health={"method": "m"}),
    }
    one = a_submission("t1", env={"SEED": "4"}, **told, **terms)
    await store.submit(one)
    await store.submit_batch(BatchSubmission([a_submission("t2", **told)]))
    specs = [(await store.specs([TaskId(name)]))[TaskId(name)] for name in ("t1", "t2")]
    records = [await store.record(TaskId(name)) for name in ("t1", "t2")]
    assert specs == [one.spec, a_submission("t2", **told).spec]
    assert [record and record.spec for record in records] == specs


async def test_an_inference_reads_back_with_the_model_that_is_to_answer_it(store: TaskStore) -> None:
    task = a_task("i1", answered_by="resnet")
    spec = RunSpec(kind="inference", entrypoint="resnet", arguments=b"\x00\xff")
    await store.submit(AdmittedTask(task, spec))
    record = await store.record(task.id)
    assert record is not None
    assert (record.task, record.spec, record.task.holder) == (task, spec, INFERENCE)
    [event] = await log_of(store)
    assert read_task(event.payload) == task
    assert (await store.snapshot()).tasks == [task]
    assert [found.task.id for found in await store.records(TaskFilter("default", kind="inference"))] == ["i1"]
