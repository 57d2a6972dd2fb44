"""Objects as arguments on real Ray: one copy per node, which no run can change; large results."""

import filecmp
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from gpubroker import Broker, CallFailed, ObjectRef, Refused, TaskFailed

from bench import objects
from tests.e2e.service_process import OPEN, ServiceProcess, environment, until
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
    listed = {"object": broker.upload(json.dumps(named).encode()).id}
    body = {"run": {"entrypoint": "tests.e2e.work:size_of"}, "items": listed, "resources": {"cpu": 0.1}}
    headers = {"Authorization": f"Bearer {broker.connection.token}"}
    array = httpx.post(f"{broker.connection.url}/arrays", json=body, headers=headers).json()
    until(lambda: broker.array(array["id"]).state == "succeeded", "items that an object lists are done")
    assert [item.value for item in broker.array_items(array["id"])] == [10, 10, 10]
    until(lambda: not list(broker.list(state=OPEN)), "the workers end")


def test_node_shows_how_much_of_its_object_store_is_used(broker: Broker) -> None:
    named = broker.put(np.ones(4_000_000))
    assert broker.result(broker.submit(lambda array: array.size, named, cpu=0.1)) == 4_000_000

    def used_mb() -> int:
        [node] = broker.nodes().items
        store = node.measured.object_store if node.measured else None
        return (store.used_mb or 0) if store else 0

    until(lambda: used_mb() >= 30, "the object that the node keeps counts as used")
    headers = {"Authorization": f"Bearer {broker.connection.token}"}
    metrics = httpx.get(f"{broker.connection.url}/metrics", headers=headers).text
    assert "gpubroker_node_object_store_used_bytes{" in metrics


def doubled(array: Any, *, more: bytes) -> tuple[float, str, int]:
    array *= 2  # its own
    return float(array.sum()), type(more).__name__, len(more)


def test_arguments_larger_than_a_request_arrive_as_they_are(broker: Broker) -> None:
    array, more = np.ones(1_200_000), b"x" * 9_000_000
    task = broker.submit(doubled, array, kwargs={"more": more}, cpu=1)
    assert broker.result(task) == (2_400_000.0, "bytes", 9_000_000)
    assert broker.result(broker.submit("tests.e2e.work:size_of", list(range(2_000_000)))) == 2_000_000
    items = [np.full(1_500_000, number) for number in range(3)]
    assert list(broker.map(lambda item: float(item[0]), items, cpu=0.1)) == [0.0, 1.0, 2.0]


def test_function_that_refers_to_more_than_a_request_runs_with_it(broker: Broker) -> None:
    table = np.ones(1_200_000)

    def total(first: float, *, more: float = 0.0) -> float:
        table[0] = 2.0  # the copy of its process, which it may change
        return float(table.sum()) + first + more

    task = broker.submit(total, 7, kwargs={"more": 0.5}, cpu=1)
    assert broker.result(task) == 1_200_008.5
    assert list(broker.map(total, [1.0, 2.0], cpu=0.1, max_parallel=2)) == [1_200_002.0, 1_200_003.0]


def test_arguments_of_calls_larger_than_a_request_arrive_as_they_are(broker: Broker) -> None:
    class Doubler:
        def doubled(self, array: Any, more: bytes) -> tuple[float, str, int]:
            return doubled(array, more=more)

    workers = broker.create_worker_set(Doubler, cpu=0.1)
    called = broker.call_worker(workers, "doubled", np.ones(1_200_000), b"x" * 9_000_000)
    assert called == (2_400_000.0, "bytes", 9_000_000)
    broker.end_worker_set(workers)
    named = broker.create_worker_set("tests.e2e.work:Counter", cpu=0.1)
    with pytest.raises(CallFailed, match="TypeError: "):
        broker.call_worker(named, "add", ["x" * 9_000_000])
    broker.end_worker_set(named)
    until(lambda: list(broker.worker_sets()) == [], "both sets are over")


def test_task_whose_object_was_deleted_fails_at_its_start_without_a_retry(broker: Broker) -> None:
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
def test_result_beyond_the_limit_becomes_an_object_the_next_task_reads(broker: Broker, target: Any) -> None:
    size = 6_000_000
    task = broker.submit(target, size, cpu=1)
    assert broker.result(task) == "x" * size
    outcome = broker.outcome(task)
    assert outcome.format == "object"
    stored = ObjectRef(outcome.value["object"])
    assert broker.result(broker.submit(len, stored, cpu=1)) >= size
    broker.delete_object(stored.id)


def test_a_small_form_of_the_benchmark_compares_with_plain_ray(broker: Broker) -> None:
    """Each side checks what its tasks have read."""
    small = Namespace(mb=1, reads=3, rounds=1)
    stored, read = objects.against_ray(broker, "sqlite", small, "")
    assert [stored.figure, read.figure] == ["objects.stored_1mb", "objects.read_1mb"]
    assert [stored.n, read.n] == [1, 3]
    assert all(figure.baseline and figure.ratio for figure in (stored, read))


SIZE_MB, MAX_MB = 256, 96
COMMAND = """
import atexit, sys
from pathlib import Path
from gpubroker.cli import main as main

def show():
    print("STATUS", Path("/proc/self/status").read_text(), file=sys.stderr)

atexit.register(show)
main()
"""


def peak_mb(status: str) -> int:
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024


def test_a_file_larger_than_what_memory_may_take_goes_up_and_comes_down(
    service: ServiceProcess, tmp_path: Path
) -> None:
    """Through the commands and the service, which hold a part of it at a time."""
    small, large, again = (tmp_path / name for name in ("small", "large", "again"))
    small.write_bytes(b"x")
    with large.open("wb") as file:
        file.truncate(SIZE_MB * 2**20)
    env = environment(GPUBROKER_URL=service.url, GPUBROKER_TOKEN=service.token)

    def carried(*words: str) -> tuple[str, int]:
        """What a command said, and the most memory that it took."""
        ended = subprocess.run(
            [sys.executable, "-c", COMMAND, *words], env=env, capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip(), peak_mb(ended.stderr)

    _, usual_mb = carried("upload", str(small))
    process = Path(f"/proc/{service.pid}")
    (process / "clear_refs").write_text("5")  # the peak begins anew
    before_mb = peak_mb((process / "status").read_text())
    id, took_mb = carried("upload", str(large))
    _, down_mb = carried("objects", "download", id, str(again))
    assert filecmp.cmp(large, again, shallow=False)
    service_mb = peak_mb((process / "status").read_text()) - before_mb
    more_mb = took_mb - usual_mb, down_mb - usual_mb, service_mb
    assert max(more_mb) < MAX_MB, more_mb
    service.broker.delete_object(id)
