"""Items of an array: shared by its workers, done once each, whatever becomes of workers and leaders."""

import json
from dataclasses import dataclass, field

import pytest
from gpubroker_server.core.domain.orders import (
    Ended,
    Ending,
    Failure,
    ItemResult,
    ItemsOrder,
    ItemsReported,
)
from gpubroker_server.core.domain.submission import (
    array_terms_from,
)
from gpubroker_server.core.domain.units import Fence, TaskId
from gpubroker_server.core.lifecycle.array_items import MAX_WANTED, PAGE_BYTES, ArrayWork, ranges_of
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import to_builtins
from msgspec.structs import replace

from tests.builders import NOW
from tests.core.arrays import POLICY, WORKERS, Stage, numbers_in, reported, result, terms


def test_workers_get_different_items_and_results_are_stored_once() -> None:
    stage = Stage(ArrayWork(terms(), (), 0))
    first, second = stage.tell(reported("w0", 20), reported("w1", 20))
    mine, others = numbers_in(first.held), numbers_in(second.held)
    assert mine
    assert others
    assert not set(mine) & set(others)
    done = reported("w0", 20, *map(result, mine), number=2)
    [answer] = stage.tell(done)
    assert answer.number == 2
    assert not set(numbers_in(answer.held)) & {*mine, *others}
    stage.tell(done)
    assert [line["number"] for line in stage.lines()] == mine
    assert stage.lines()[0] == {
        "number": 0, "state": "succeeded", "seconds": 0.01, "tries": 1, "result": 0,
    }  # fmt: skip
    assert stage.world.tasks[TaskId("w0")].checkpoint_at == NOW


def test_a_failed_item_has_its_error_and_pickled_results_are_base64() -> None:
    stage = Stage(ArrayWork(terms(2, result_format="cloudpickle"), (), 0))
    stage.tell(reported("w0", 2, result(0), result(1, Failure("exception", "ValueError: x", "trace"))))
    one, two = stage.lines()
    assert one["data_base64"] == "MA=="
    assert two["error"] == {"kind": "exception", "message": "ValueError: x", "traceback": "trace"}
    assert [page.failed for page in stage.pages] == [1]


def test_a_given_chunk_is_handed_out_whole() -> None:
    stage = Stage(ArrayWork(terms(chunk=30), (), 0))
    [answer] = stage.tell(reported("w0", 1))
    assert answer.held == ((0, 30),)


@pytest.mark.parametrize(("item_ms", "chunk"), [(1, 100), (5, 20), (20, 5), (100, 1), (500, 1)])
def test_without_a_chunk_work_is_handed_out_in_tenths_of_a_second(item_ms: int, chunk: int) -> None:
    """Whatever has been done, a run that wants a second of work gets more in pieces of about 100 ms."""
    stage, wanted = Stage(ArrayWork(terms(100_000), (), 0)), max(1, 1000 // item_ms)
    [answer] = stage.tell(reported("w0", wanted))
    assert len(numbers_in(answer.held)) == wanted
    [answer] = stage.tell(reported("w0", wanted, result(0), number=2))
    assert len(numbers_in(answer.held)) == wanted - 1 + chunk


def test_shares_shrink_towards_the_end() -> None:
    stage = Stage(ArrayWork(terms(1000), (), 0))
    sizes = []
    while stage.work.left:
        for worker in WORKERS[:2]:
            held = numbers_in(stage.work.held_by(stage.world.tasks[TaskId(worker)]))
            [answer] = stage.tell(reported(worker, 100, *map(result, held)))
            sizes.append(len(numbers_in(answer.held)))
    assert sizes[1] == 100
    assert sizes[-6:-2] == sorted(sizes[-6:-2], reverse=True)
    assert 0 < sizes[-3] <= 20


def test_no_run_gets_all_that_is_left() -> None:
    """Whatever it wants: others would have nothing to do, and the leader looks at what each run holds."""
    stage = Stage(ArrayWork(terms(60), (), 0))
    first, second = stage.tell(reported("w0", 2**20), reported("w1", 2**20))
    assert (len(numbers_in(first.held)), len(numbers_in(second.held))) == (30, 15)
    large = Stage(ArrayWork(terms(100_000), (), 0))
    [answer] = large.tell(reported("w0", 2**20))
    assert len(numbers_in(answer.held)) == MAX_WANTED


def test_only_the_items_of_the_array_are_given_and_accepted() -> None:
    stage = Stage(ArrayWork(terms(numbers=((3, 4), (7, 9))), (), 0))
    [answer] = stage.tell(reported("w0", 10, result(0), result(5), result(99), result(7)))
    assert stage.work.left == 2
    assert set(numbers_in(answer.held)) <= {3, 8}
    assert [page.first for page in stage.pages] == [7]


def test_a_report_of_an_older_claim_changes_nothing() -> None:
    stage = Stage(ArrayWork(terms(), (), 0))
    [answer] = stage.tell(reported("w0", 10))
    stage.restart("w0", crashed=False)
    assert stage.tell(reported("w0", 10, *map(result, numbers_in(answer.held)))) == []
    assert stage.pages == []


def test_a_worker_that_leaves_gives_its_items_back() -> None:
    stage = Stage(ArrayWork(terms(10, chunk=5), (), 0))
    stage.tell(reported("w0", 1))
    stage.tell(reported("w0", 0, result(0), number=2))
    [answer] = stage.tell(reported("w1", 10))
    assert numbers_in(answer.held) == [1, 2, 3, 4, 5]


def test_a_worker_is_over_when_nothing_is_left_for_it() -> None:
    stage = Stage(ArrayWork(terms(2, chunk=2), (), 0))
    first, second = stage.tell(reported("w0", 9), reported("w1", 9))
    assert not first.is_over
    assert second.is_over
    [last] = stage.tell(reported("w0", 9, result(0), result(1), number=2))
    assert last.is_over


def test_the_last_results_and_the_end_of_a_run_are_one_decision() -> None:
    stage = Stage(ArrayWork(terms(1), (), 0))
    end = Ended(TaskId("w0"), Fence(1), NOW, Ending.SUCCEEDED, result=b"null")
    stage.tell(reported("w0", 1, result(0)), end)
    assert stage.work.left == 0
    assert TaskId("w0") not in stage.world.tasks


def test_array_beyond_its_result_limit_drops_results_and_still_ends() -> None:
    policy = replace(POLICY, array_result_bytes=600)
    stage = Stage(ArrayWork(terms(4), (), 0), policy=policy)
    stage.tell(reported("w0", 9, result(0), ItemResult(1, 0.0, 1, b'"' + b"x" * 600 + b'"', None)))
    failure = Failure("exception", "no", "trace " * 100)
    stage.tell(reported("w0", 9, result(2), result(3, failure), number=2))
    zero, one, two, three = stage.lines()
    assert (zero["result"], two["result"]) == (0, 2)
    assert one["error"]["kind"] == "array_results_too_large"
    assert "limits.array_result_bytes" in one["error"]["message"]
    assert (three["error"]["kind"], three["error"]["traceback"]) == ("exception", "")
    assert stage.work.left == 0
    assert stage.work.size_bytes == sum(len(page.lines) for page in stage.pages)
    assert [page.failed for page in stage.pages] == [1, 1]


def test_large_results_are_cut_into_pages() -> None:
    stage = Stage(ArrayWork(terms(3), (), 0))
    large = [ItemResult(n, 0.0, 1, b'"' + b"x" * (PAGE_BYTES // 2) + b'"', None) for n in range(3)]
    stage.tell(reported("w0", 9, *large))
    assert [(page.first, page.count, page.page) for page in stage.pages] == [(0, 2, 1), (2, 1, 2)]


def test_a_new_leader_learns_what_each_worker_holds() -> None:
    stage = Stage(ArrayWork(terms(10, chunk=5), (), 0))
    [answer] = stage.tell(reported("w0", 1))
    stage.lose_leader()
    stage.tell(reported("w0", 1, held=answer.held, number=2))
    [other] = stage.tell(reported("w1", 1))
    assert not set(numbers_in(answer.held)) & set(numbers_in(other.held))


def test_terms_come_back_from_json() -> None:
    given = terms(numbers=((0, 3), (5, 9)), chunk=2)
    assert array_terms_from(json.loads(json.dumps(to_builtins(given)))) == given
    assert given.total == 7


def test_ranges() -> None:
    assert list(ranges_of([1, 2, 3, 7, 9, 10])) == [(1, 4), (7, 8), (9, 11)]
    assert list(ranges_of([])) == []


@dataclass
class Run:
    """A worker's process, as gpubroker.runtime.items works."""

    worker: str
    fence: int = 1
    number: int = 0
    answered: int = 0
    todo: list[int] = field(default_factory=list)
    results: list[tuple[int, int]] = field(default_factory=list)
    is_over: bool = False

    def do(self, count: int) -> None:
        for item in self.todo[:count]:
            self.results.append((self.number + 1, item))
        self.todo = self.todo[count:]

    def report(self, wanted: int) -> ItemsReported:
        self.number += 1
        held = tuple(ranges_of(sorted(self.todo)))
        results = (result(item) for _, item in self.results)
        return reported(self.worker, wanted, *results, number=self.number, fence=Fence(self.fence), held=held)

    def hear(self, order: ItemsOrder) -> None:
        if order.fence == self.fence and order.number > self.answered:
            self.answered = order.number
            self.results = [one for one in self.results if one[0] > order.number]
            done = {item for _, item in self.results}
            self.todo = [item for item in numbers_in(order.held) if item not in done]
            self.is_over = order.is_over and order.number == self.number


STEPS = st.one_of(
    st.tuples(st.just("do"), st.sampled_from(WORKERS), st.integers(1, 5)),
    st.tuples(st.just("report"), st.sampled_from(WORKERS), st.integers(1, 12)),
    st.tuples(st.just("lost report"), st.sampled_from(WORKERS), st.integers(1, 12)),
    st.tuples(st.just("lost answer"), st.sampled_from(WORKERS), st.integers(1, 12)),
    st.tuples(st.just("failed commit"), st.sampled_from(WORKERS), st.integers(1, 12)),
    st.tuples(st.just("leave"), st.sampled_from(WORKERS), st.just(0)),
    st.tuples(st.just("preempted"), st.sampled_from(WORKERS), st.just(0)),
    st.tuples(st.just("crashed"), st.sampled_from(WORKERS), st.just(0)),
    st.tuples(st.just("new leader"), st.just(""), st.just(0)),
)


def _step(stage: Stage, runs: dict[str, Run], what: str, worker: str, count: int) -> None:
    if what == "new leader":
        stage.lose_leader()
        return
    run = runs[worker]
    match what:
        case "do":
            run.do(count)
        case "lost report":
            run.report(count)
        case "failed commit":
            stage.tell(run.report(count), is_committed=False)
        case "report" | "lost answer" | "leave":
            for order in stage.tell(run.report(count)):
                if what == "report":
                    run.hear(order)
    if what in ("leave", "preempted", "crashed"):
        stage.restart(worker, crashed=what == "crashed")
        runs[worker] = Run(worker, run.fence + 1)


@settings(deadline=None)
@given(
    st.integers(1, 60),
    st.sampled_from([None, 1, 7]),
    st.lists(STEPS, max_size=40),
)
def test_no_item_is_lost_or_accepted_twice(
    total: int, chunk: int | None, steps: list[tuple[str, str, int]]
) -> None:
    """Under lost messages, failed commits, new leaders, and workers that leave, are preempted or crash."""
    stage = Stage(ArrayWork(terms(total, chunk=chunk, item_retries=100), (), 0))
    runs = {worker: Run(worker) for worker in WORKERS}
    for what, worker, count in steps:
        _step(stage, runs, what, worker, count)
    for _ in range(20 * total):
        for run in runs.values():
            run.do(3)
            for order in stage.tell(run.report(6)):
                run.hear(order)
        if not stage.work.left:
            break
    assert [line["number"] for line in stage.lines()] == list(range(total))
    assert {line["state"] for line in stage.lines()} == {"succeeded"}
    assert [page.page for page in stage.pages] == list(range(1, len(stage.pages) + 1))
