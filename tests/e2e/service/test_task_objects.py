"""Objects as arguments on real Ray: one copy per node, which no run can change; large results."""

from typing import Any

import numpy as np
import pytest
from gpubroker import Broker, ObjectRef, Refused, TaskFailed

from tests.e2e.service_process import OPEN, until
from tests.e2e.work import where_it_lies


def test_runs_read_one_copy_of_an_array_and_cannot_change_it(broker: Broker) -> None:
    array = np.arange(1_500_000.0)
    stored = broker.put(array)
    assert stored.size_bytes > array.nbytes
    own = [broker.submit(where_it_lies, stored, cpu=1) for _ in range(2)]
    shared = [broker.submit("tests.e2e.work:where_it_lies", stored, cpu=0.1) for _ in range(2)]
    found = [broker.result(task) for task in (*own, *shared)]
    assert {each["sum"] for each in found} == {float(array.sum())}
    assert {each["refused"] for each in found} == {"assignment destination is read-only"}
    assert len({each["pid"] for each in found}) >= 3
    assert len({tuple(each["file"]) for each in found}) == 1, "all read the same bytes of Ray's object store"


def test_arguments_and_items_of_an_array_are_objects(broker: Broker) -> None:
    weights = broker.put({"w": np.ones(100_000)})
    items = [broker.put(np.full(10, number)) for number in range(3)]
    found = broker.map(lambda item, given: float(item.sum() * given["w"][0]), items, weights, cpu=0.1)
    assert list(found) == [0.0, 10.0, 20.0]
    named = [{"object": item.id} for item in items]
    assert list(broker.map("tests.e2e.work:size_of", named, cpu=0.1)) == [10, 10, 10]
    until(lambda: not list(broker.list(state=OPEN)), "the workers end")


def test_a_task_whose_object_was_deleted_fails_when_it_starts_and_is_not_retried(broker: Broker) -> None:
    stored = broker.put(b"bytes")
    first = broker.submit("tests.e2e.work:size_of", stored, cpu=0.1)
    assert broker.result(first) == 5
    held = broker.submit("tests.e2e.work:size_of", stored, cpu=0.1, held=True, max_retries=3)
    broker.delete_object(stored.id)
    with pytest.raises(Refused, match="you have no object"):
        broker.submit("tests.e2e.work:size_of", stored)
    broker.change(held, held=False)
    with pytest.raises(TaskFailed, match="it was deleted"):
        broker.result(held)
    assert broker.get(held).attempt == 1


@pytest.mark.parametrize(
    "target", [lambda size: "x" * size, "tests.e2e.work:text_of"], ids=["pickled", "JSON"]
)
def test_a_result_beyond_the_limit_becomes_an_object_that_the_next_task_reads(
    broker: Broker, target: Any
) -> None:
    size = 6_000_000
    task = broker.submit(target, size, cpu=1)
    assert broker.result(task) == "x" * size
    outcome = broker.outcome(task)
    assert outcome.format == "object"
    stored = ObjectRef(outcome.value["object"])
    assert broker.result(broker.submit(len, stored, cpu=1)) >= size
    broker.delete_object(stored.id)
