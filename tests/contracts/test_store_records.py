"""What people look up: lists, specs, tokens."""

import asyncio
from typing import Any

import pytest
from gpubroker.wire.worker_sets import Scaling
from gpubroker_server.core.control.idle_templates import Template
from gpubroker_server.core.domain.decisions import (
    AuditNote,
    Decision,
    QueuePause,
    Request,
    StreamState,
    WorkerSetWrite,
    write_move,
)
from gpubroker_server.core.domain.holders import External, Model, WorkerSeat
from gpubroker_server.core.domain.submission import WorkerSet
from gpubroker_server.core.domain.task import Dependency, Move, OnFailure, TaskState
from gpubroker_server.core.domain.units import Instant, Seconds, TaskId
from gpubroker_server.ports.idle_templates import IdleTemplate
from gpubroker_server.ports.store import (
    AdmittedTask,
    RunSpec,
    StoredState,
    TaskFilter,
    TaskSort,
    TaskStore,
    TokenRow,
)
from msgspec.structs import replace

from tests.builders import NOW, a_demand, a_task
from tests.contracts.scenes import (
    a_checkpoint,
    a_submission,
    admission,
    claimed,
    end,
    log_of,
    next_term,
    replayed,
    with_gpu,
)


async def listed(store: TaskStore, tenant: str = "lab", **wanted: object) -> list[str]:
    return [row.task.id for row in await store.records(replace(TaskFilter(tenant), **wanted))]


@pytest.fixture
async def six(store: TaskStore) -> TaskStore:
    """t1…t6 of lab: t1 admitted, t2 succeeded, priorities 10…60, `even` and `third` as labels; t7 of web."""
    term = await with_gpu(store)
    tasks = [a_task(f"t{n}", tenant="lab", name=f"job-{n % 2}", priority=n * 10) for n in range(1, 7)]
    for n, task in enumerate(tasks, start=1):
        labels = {"even": str(n % 2 == 0).lower(), **({"third": "yes"} if n % 3 == 0 else {})}
        await store.submit(a_submission(task, labels=labels))
    await store.submit(a_submission(a_task("t7", tenant="web"), labels={"even": "true"}))
    await store.commit(term, [admission(tasks[0]), admission(tasks[1]), end(claimed(tasks[1]))])
    return store


async def test_a_tenant_sees_its_own_tasks_newest_first(six: TaskStore) -> None:
    assert await listed(six) == ["t6", "t5", "t4", "t3", "t2", "t1"]
    assert await listed(six, "web") == ["t7"]
    assert await listed(six, "nobody") == []


async def test_ended_tasks_in_quarantine_are_selected_without_unfinished_ones(six: TaskStore) -> None:
    """t1 is admitted, and t2 has ended with a lease that is not released."""
    assert await listed(six, quarantined=True) == ["t2"]
    assert await listed(six, quarantined=False) == []
    ended = tuple(state for state in TaskState if state.is_terminal)
    assert await listed(six, states=ended, quarantined=True) == ["t2"]
    assert await listed(six, states=(TaskState.ADMITTED, *ended), quarantined=True) == ["t2", "t1"]
    assert await listed(six, states=(TaskState.ADMITTED, *ended), quarantined=False) == ["t1"]


async def test_pages_follow_each_other_without_gap_or_repetition(six: TaskStore) -> None:
    first = await listed(six, limit=4)
    assert first == ["t6", "t5", "t4", "t3"]
    assert await listed(six, limit=4, after=("t3",)) == ["t2", "t1"]
    await six.submit(a_submission(a_task("t8", tenant="lab")))
    assert await listed(six, limit=4, after=("t3",)) == ["t2", "t1"]


async def test_tasks_are_sorted_by_priority_or_end_with_pages_that_follow(six: TaskStore) -> None:
    term = await next_term(six)
    await six.submit(a_submission(a_task("t8", tenant="lab", priority=30)))
    by_priority = {"sort": TaskSort.PRIORITY}
    assert await listed(six, **by_priority) == ["t6", "t5", "t4", "t8", "t3", "t2", "t1"]
    assert await listed(six, **by_priority, after=(30, "t8"), limit=2) == ["t3", "t2"]
    up: dict[str, Any] = {"sort": TaskSort.PRIORITY, "descending": False}
    assert await listed(six, **up, limit=4) == ["t1", "t2", "t3", "t8"]
    assert await listed(six, **up, after=(30.0, "t3")) == ["t8", "t4", "t5", "t6"]
    assert await listed(six, descending=False, after=("t5",)) == ["t6", "t8"]
    first = claimed(a_task("t1", tenant="lab", name="job-1", priority=10))
    earlier = write_move(first, Move.FAILED, finished_at=Instant(NOW - 0.25))
    await six.commit(term, [Decision("t1", "ended", tasks=(earlier,))])
    by_end: dict[str, Any] = {"sort": TaskSort.FINISHED, "states": (TaskState.SUCCEEDED, TaskState.FAILED)}
    assert await listed(six, **by_end) == ["t2", "t1"]
    assert await listed(six, **by_end, after=(NOW, "t2")) == ["t1"]
    assert await listed(six, **by_end, descending=False, after=(NOW - 0.25, "t1")) == ["t2"]


async def test_first_records_are_read_filter_after_filter_up_to_the_limit(six: TaskStore) -> None:
    lab = TaskFilter("lab")
    running = replace(lab, states=(TaskState.ADMITTED,))
    queued = replace(lab, states=(TaskState.PENDING,), ids=(TaskId("t4"), TaskId("t1"), TaskId("t7")))
    waiting, ended = replace(lab, states=(TaskState.PENDING,)), replace(lab, states=(TaskState.SUCCEEDED,))

    async def first(*parts: TaskFilter, limit: int = 9) -> list[str]:
        return [record.task.id for record in await six.first_records(parts, limit)]

    assert await first(running, queued, waiting, ended) == ["t1", "t4", "t6", "t5", "t3", "t2"]
    assert await first(running, queued, waiting, ended, limit=2) == ["t1", "t4"]
    assert await first(replace(lab, ids=())) == await first() == []


async def test_the_ids_of_what_matches_are_selected_without_holders_of_models(six: TaskStore) -> None:
    await six.submit(a_submission(a_task("t8", tenant="lab", priority=60, holder=Model("main", "llm"))))
    assert (await listed(six, kind="entrypoint"))[0] == "t8"
    assert "t8" not in await listed(six)
    wanted = TaskFilter("lab", kind="entrypoint", min_priority=30, max_priority=50)
    assert await six.selected(wanted) == ["t5", "t4", "t3"]
    assert await six.selected(replace(wanted, max_priority=None, limit=2)) == ["t6", "t5"]
    assert await six.selected(replace(wanted, states=(TaskState.SUCCEEDED,), min_priority=0)) == ["t2"]
    assert await six.selected(TaskFilter("lab", labels={"even": "true", "third": "yes"})) == ["t6"]


async def test_the_moves_of_tasks_are_their_changes_of_state_in_order(six: TaskStore) -> None:
    t2 = claimed(a_task("t2", tenant="lab", priority=20))
    first = claimed(a_task("t1", tenant="lab", name="job-1", priority=10))
    term = await next_term(six)
    await six.commit(term, [a_checkpoint(first, 1)])
    moves = await six.moves([first.id, t2.id, TaskId("t3"), TaskId("none")])
    assert [(event.key, event.kind) for event in moves] == [
        ("t1", "task.submitted"),
        ("t2", "task.submitted"),
        ("t3", "task.submitted"),
        ("t1", "task.admitted"),
        ("t2", "task.admitted"),
        ("t2", "task.succeeded"),
    ]
    assert moves[3].fields["admitted_at"] == NOW
    assert await six.moves([]) == []


async def test_a_queue_stays_paused_until_it_is_resumed(six: TaskStore) -> None:
    pauses = [QueuePause("tenant:lab", Instant(NOW), "ada", "moving"), QueuePause("stream:a", NOW, "ada")]
    note = AuditNote(Instant(NOW), "lab", "ada", "queue.pause", "tenant:lab", "moving")
    before = await log_of(six)
    term = await next_term(six)
    await six.commit(term, [Decision("queue", "pause", paused=tuple(pauses), audit=(note,))])
    assert {pause.queue: pause for pause in (await six.snapshot()).pauses} == {it.queue: it for it in pauses}
    await six.commit(term, [Decision("queue", "unpause", resumed=(pauses[1],))])
    assert list((await six.snapshot()).pauses) == pauses[:1]
    assert replayed(await log_of(six)).queue.pauses == {"tenant:lab": pauses[0]}
    told = [(event.kind, event.key, event.tenant) for event in (await log_of(six))[len(before) :]]
    assert told == [
        ("queue.paused", "tenant:lab", "lab"),
        ("queue.paused", "stream:a", ""),
        ("queue.resumed", "stream:a", ""),
    ]


async def test_what_is_told_of_a_work_stream_replaces_what_was_until_nothing_is(six: TaskStore) -> None:
    ladder = StreamState("ladder", 3.0, 1200.5, NOW, 40.0, Instant(NOW - 60.0), 0.5)
    bare, again = StreamState("nightly", quality=0.25), replace(ladder, curriculum=None, progress=None)
    before, term = await log_of(six), await next_term(six)
    await six.commit(term, [Decision("ladder", "stream", streams=(ladder, bare))])
    assert sorted((await six.snapshot()).streams, key=lambda it: it.name) == [ladder, bare]
    await six.commit(term, [Decision("ladder", "stream", streams=(again, StreamState("nightly")))])
    assert list((await six.snapshot()).streams) == [again]
    assert replayed(await log_of(six)).streams == {"ladder": again}
    told = [(event.kind, event.key, event.tenant) for event in (await log_of(six))[len(before) :]]
    assert told == [
        ("stream.changed", "ladder", ""),
        ("stream.changed", "nightly", ""),
        ("stream.changed", "ladder", ""),
        ("stream.removed", "nightly", ""),
    ]


async def test_a_worker_set_stays_until_it_is_over(six: TaskStore) -> None:
    ids, scaling = (TaskId("t1"), TaskId("t2")), Scaling("calls", 4.0, Seconds(60.0))
    workers = WorkerSet(ids[0], "lab", "solvers", ids, 0, 2, 1, 8, Instant(NOW), scaling)
    term = await next_term(six)
    await six.commit(term, [Decision("t1", "form", worker_sets=(WorkerSetWrite(workers, "formed"),))])
    more = replace(workers, count=2, signal=3.5)
    scaled = WorkerSetWrite(more, "changed", ("count", "signal"))
    await six.commit(term, [Decision("t1", "scale", worker_sets=(scaled,))])
    assert list((await six.snapshot()).worker_sets) == [more]
    assert replayed(await log_of(six)).worker_sets == {"t1": more}
    await six.commit(term, [Decision("t1", "over", worker_sets=(WorkerSetWrite(more, "over"),))])
    assert list((await six.snapshot()).worker_sets) == []
    assert replayed(await log_of(six)).worker_sets == {}


async def test_many_requests_are_stored_in_one_commit_and_a_repeated_one_once(six: TaskStore) -> None:
    asked = [Request(f"r{n}", TaskId(f"t{n}"), "lab", "cancel", {}, NOW) for n in (3, 4)]
    await six.request(*asked)
    await six.request(*asked[:1])
    assert list((await six.snapshot()).requests) == asked
    *_, first, second = await log_of(six)
    assert [(event.kind, event.key) for event in (first, second)] == [
        ("request.made", "r3"), ("request.made", "r4")
    ]  # fmt: skip
    assert first.at == second.at


async def test_external_holders_are_kept_as_they_asked_and_listed_apart(six: TaskStore) -> None:
    terms = External(Seconds(60.0), pid=4711)
    await six.submit(a_submission(a_task("t8", tenant="lab", holder=terms, deadline_at=Instant(NOW + 60))))
    assert await listed(six, kind="external") == ["t8"]
    assert (await listed(six))[:2] == ["t8", "t6"]
    [task] = [task for task in (await six.snapshot()).tasks if task.id == "t8"]
    assert (task.holder, task.deadline_at) == (terms, NOW + 60)
    replay = replayed(await log_of(six))
    assert replay.tasks[TaskId("t8")] == task
    term = await next_term(six, "test")
    renewed = write_move(task, Move.CHANGED, deadline_at=Instant(NOW + 90))
    await six.commit(term, [Decision("t8", "renew", tasks=(renewed,))])
    record = await six.record(TaskId("t8"))
    assert record is not None
    assert record.task == renewed.task


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ((TaskState.PENDING,), ["t6", "t5", "t4", "t3"]),
        ((TaskState.ADMITTED,), ["t1"]),
        ((TaskState.SUCCEEDED,), ["t2"]),
        ((TaskState.SUCCEEDED, TaskState.FAILED), ["t2"]),
        ((TaskState.ADMITTED, TaskState.SUCCEEDED), ["t2", "t1"]),
        ((TaskState.EXPIRED,), []),
    ],
)
async def test_a_list_is_narrowed_by_state(
    six: TaskStore, states: tuple[TaskState, ...], expected: list[str]
) -> None:
    assert await listed(six, states=states) == expected


async def test_a_list_is_narrowed_by_priority_and_name(six: TaskStore) -> None:
    assert await listed(six, min_priority=50) == ["t6", "t5"]
    assert await listed(six, max_priority=20) == ["t2", "t1"]
    assert await listed(six, min_priority=20, max_priority=40, name="job-0") == ["t4", "t2"]


async def test_a_list_is_filtered_by_dependencies_and_kind(
    store: TaskStore,
) -> None:
    after = (Dependency(TaskId("t1")), Dependency(TaskId("t2"), OnFailure.IGNORE))
    tasks = [
        a_task("t1", tenant="lab", stream="main"),
        a_task("t2", tenant="lab", after=after[:1], awaits=True),
        a_task("t3", tenant="lab", after=after, awaits=True, stream="main"),
        a_task("t4", tenant="web", after=after[:1], awaits=True),
    ]
    for task in tasks:
        await store.submit(a_submission(task, model_type="yolo" if task.id == "t2" else ""))
    assert await listed(store, runs_after=TaskId("t1")) == ["t3", "t2"]
    assert await listed(store, runs_after=TaskId("t2")) == ["t3"]
    assert await listed(store, runs_after=TaskId("t")) == []
    assert await listed(store, stream="main") == ["t3", "t1"]
    assert await listed(store, model_type="yolo") == ["t2"]


async def test_a_list_is_narrowed_by_when_tasks_came_and_ended(store: TaskStore) -> None:
    term = await next_term(store, "test")
    for n in range(4):
        await store.submit(a_submission(a_task(f"t{n}", tenant="lab", submitted_at=Instant(NOW + n))))
    row = (await store.records(TaskFilter("lab", limit=1)))[0].task
    ended = write_move(row, Move.CANCELLED, finished_at=Instant(NOW + 9))
    await store.commit(term, [Decision(row.id, "cancel", tasks=(ended,))])
    assert await listed(store, submitted_from=NOW + 1, submitted_before=NOW + 3) == ["t2", "t1"]
    assert await listed(store, finished_from=NOW + 9) == ["t3"]
    assert await listed(store, finished_before=NOW + 9) == []


async def test_all_given_labels_must_match(six: TaskStore) -> None:
    assert await listed(six, labels={"even": "true"}) == ["t6", "t4", "t2"]
    assert await listed(six, labels={"even": "true", "third": "yes"}) == ["t6"]
    assert await listed(six, labels={"even": "yes"}) == []
    assert await listed(six, labels={"even": "false"}, states=(TaskState.PENDING,), limit=1) == ["t5"]


async def test_a_listed_record_is_the_record(six: TaskStore) -> None:
    for row in await six.records(TaskFilter("lab")):
        assert row == await six.record(row.task.id)


async def test_what_is_not_there_is_not_found(six: TaskStore) -> None:
    assert await six.record(TaskId("nothing")) is None
    assert await six.result(TaskId("t1")) is None
    assert list(await six.checkpoints(TaskId("t1"))) == []
    assert list(await six.specs([TaskId("t1"), TaskId("nothing")])) == ["t1"]
    assert await six.specs([]) == {}


def a_token(name: str = "ci", **fields: object) -> TokenRow:
    facts = {"tenant": "lab", "scopes": ("tasks:read", "tasks:write"), "max_priority": 60}
    row = {"sha256": f"hash-of-{name}", "created_at": Instant(NOW), "expires_at": None, **facts, **fields}
    return TokenRow(name=name, **row)  # type: ignore[arg-type]  # fields of the token


async def test_tokens_are_listed_by_name_as_they_were_put(store: TaskStore) -> None:
    tokens = [a_token("b", expires_at=Instant(NOW + 60)), a_token("a", scopes=("*",))]
    for token in tokens:
        assert await store.put_token(token, by="admin")
    assert list(await store.tokens()) == [tokens[1], tokens[0]]


async def test_of_two_tokens_of_one_name_put_at_once_the_first_stays(store: TaskStore) -> None:
    both = [a_token("a", sha256="one"), a_token("a", sha256="other", max_priority=10)]
    stored = await asyncio.gather(*(store.put_token(token, by="admin") for token in both))
    assert sorted(stored) == [False, True]
    assert list(await store.tokens()) == [both[stored.index(True)]]


async def test_a_token_is_dropped_once(store: TaskStore) -> None:
    await store.put_token(a_token("a"), by="admin")
    assert [await store.drop_token("a", by="admin") for _ in range(2)] == [True, False]
    assert list(await store.tokens()) == []


def an_idle_template(name: str = "sweep", token: str = "hash-of-a", **fields: object) -> IdleTemplate:
    template = Template(name, a_demand(gpu_mb=10), weight=3, max_running=7)
    facts = {"tenant": "lab", "task": '{"run":{}}', "made_by": "a", "made_at": Instant(NOW), **fields}
    return IdleTemplate(template, token=token, **facts)  # type: ignore[arg-type]  # its fields


async def test_idle_templates_are_listed_by_name_and_the_first_of_a_name_stays(store: TaskStore) -> None:
    two = an_idle_template("b"), an_idle_template("a", token="hash-of-b")
    assert [await store.put_idle_template(one) for one in two] == [True, True]
    assert await store.put_idle_template(an_idle_template("b", made_at=Instant(NOW + 1))) is False
    assert list(await store.idle_templates()) == [two[1], two[0]]
    assert [await store.drop_idle_template("b", by="a") for _ in range(2)] == [True, False]
    assert list(await store.idle_templates()) == [two[1]]


async def test_an_idle_template_lives_as_long_as_its_token(store: TaskStore) -> None:
    expires = a_token("b", expires_at=Instant(NOW + 60))
    for token in (a_token("a"), expires):
        await store.put_token(token, by="admin")
    for name in ("a", "b", "c"):
        await store.put_idle_template(an_idle_template(name, token=f"hash-of-{name}"))

    async def live(at: float) -> list[str]:
        return [one.name for one in await store.idle_templates(Instant(at))]

    assert await live(NOW) == ["a", "b"]
    assert await live(NOW + 60) == ["a"]
    await store.drop_token("a", by="admin")
    assert await live(NOW) == ["b"]


async def test_tokens_are_no_events(store: TaskStore) -> None:
    await store.put_token(a_token("a"), by="admin")
    await store.audit(by="admin", tenant="lab", action="shutdown", subject="service")
    assert await store.head() == 0


async def test_states_are_read_of_tasks_that_have_a_record(store: TaskStore) -> None:
    await store.submit(a_submission(a_task("t1", tenant="lab")))
    await store.submit(a_submission(a_task("t2")))
    await store.submit(a_submission(a_task("t3", holder=WorkerSeat(TaskId("t3")))))
    term = await next_term(store, "leader")
    failed = write_move(a_task("t2"), Move.FAILED, failed_by=TaskId("t1"), finished_at=NOW)
    await store.commit(term, [Decision("t2", "dependency", tasks=(failed,))])
    assert await store.states([TaskId("t1"), TaskId("t2"), TaskId("t9")]) == {
        "t1": StoredState("lab", TaskState.PENDING),
        "t2": StoredState("default", TaskState.FAILED, TaskId("t1")),
    }
    worker = (await store.states([TaskId("t3")]))[TaskId("t3")]
    assert worker.array == "t3"
    assert await store.states([]) == {}


async def test_the_entrypoints_of_pending_tasks_are_counted(store: TaskStore) -> None:
    """Not those of tasks that run or have ended, nor what else a task may be."""
    assert await store.pending_entrypoints() == {}
    term = await with_gpu(store)
    tasks = {name: a_task(name) for name in ("runs", "over", "a", "b", "c")}
    for name, task in tasks.items():
        entrypoint = "jobs:g" if name == "c" else "demo:f"
        await store.submit(AdmittedTask(task, RunSpec("entrypoint", entrypoint=entrypoint)))
    await store.submit(AdmittedTask(a_task("command"), RunSpec("command", command=("true",))))
    expiry = write_move(tasks["over"], Move.EXPIRED, finished_at=Instant(NOW))
    decided = [admission(tasks["runs"]), Decision(TaskId("over"), "expired", tasks=(expiry,))]
    assert [str(verdict) for verdict in await store.commit(term, decided)] == ["committed"] * 2
    assert await store.pending_entrypoints() == {"demo:f": 2, "jobs:g": 1}
