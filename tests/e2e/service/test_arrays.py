"""Arrays on real Ray: every item has one result, whatever becomes of workers and of the service."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from gpubroker import Array, ArrayItem, Broker, ItemFailed, Refused

from tests.e2e.service_process import GIB, ServiceProcess, until
from tests.patience import PATIENCE_SECONDS

ITEM = "tests.e2e.work:note_item"


def ended(broker: Broker, array: Array) -> Array:
    """Its workers too."""
    over = ("succeeded", "failed", "cancelled")
    until(lambda: all(worker.state in over for worker in broker.array(array).workers), "its workers end")
    return broker.array(array)


def items(broker: Broker, array: Array) -> list[ArrayItem]:
    found = list(broker.array_items(array))
    assert [item.number for item in found] == sorted({item.number for item in found}), "each item once"
    return found


def lines(witness: Path) -> list[tuple[int, int]]:
    """(process, item) of each call."""
    found = (line.split() for line in witness.read_text().splitlines()) if witness.exists() else ()
    return [(int(pid), int(item)) for pid, item in found]


def test_a_map_of_a_function_returns_its_results_in_order(
    broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    offset = 7
    found = list(broker.map(lambda x, by: {x * by + offset}, range(200), 3, max_parallel=2, progress=True))
    assert found == [{x * 3 + offset} for x in range(200)]
    assert "200/200" in capsys.readouterr().err
    as_completed = broker.map("tests.e2e.work:add", range(50), 1, ordered=False, max_parallel=2, cpu=0.1)
    assert sorted(as_completed) == [number + 1 for number in range(50)]


def test_a_task_after_an_array_runs_when_all_of_it_has_succeeded(broker: Broker, tmp_path: Path) -> None:
    for bad, state in (("", "succeeded"), ("fail 3", "failed")):
        witness = tmp_path / f"witness {bad}"
        kwargs = {"witness": str(witness), "bad": bad, "pause_seconds": 0.05}
        array = broker.submit_array(ITEM, range(12), kwargs=kwargs, max_parallel=3, chunk=1, cpu=0.1)
        after = broker.submit("tests.e2e.work:add", 1, 1, after=[array], cpu=0.1)
        whole = broker.wait(array.id, timeout_seconds=PATIENCE_SECONDS)
        assert (whole.id, whole.state) == (array.id, state)
        assert {item for _, item in lines(witness)} == set(range(12))
        assert all(worker.state == "succeeded" for worker in broker.array(array).workers)
        over = broker.wait(after.id, timeout_seconds=PATIENCE_SECONDS)
        assert over.state == state
        assert over.after[0].task == array.id


def test_a_cancel_of_an_arrays_id_as_a_task_ends_all_of_it(broker: Broker, tmp_path: Path) -> None:
    kwargs = {"witness": str(tmp_path / "witness"), "pause_seconds": 0.2}
    array = broker.submit_array(ITEM, range(500), kwargs=kwargs, max_parallel=3, cpu=0.1)
    until(lambda: broker.array(array).done > 0, "it is at work")
    broker.cancel(array.id)
    assert ended(broker, array).state == "cancelled"
    assert {worker.state for worker in broker.array(array).workers} == {"cancelled"}


def test_events_are_those_of_all_workers_and_a_log_is_asked_for_by_worker(broker: Broker) -> None:
    script = "import sys; print('item', sys.argv[1], flush=True)"
    command = [sys.executable, "-c", script, "{}"]
    array = ended(broker, broker.submit_array(command, ["one", "two"], cpu=0.1, max_parallel=2, chunk=1))
    workers = [worker.id for worker in array.workers]
    told = list(broker.events(array.id))
    assert sorted(event.key for event in told if event.kind == "task.succeeded") == sorted(workers)
    assert [event.position for event in told] == sorted(event.position for event in told)
    with pytest.raises(Refused, match=f"{array.id} has 2 workers: {', '.join(workers)}"):
        list(broker.logs(array.id))
    printed = [line for worker in workers for line in broker.logs(array.id, worker=worker, follow=True)]
    assert sorted(printed) == ["item one\n", "item two\n"]


def test_an_item_that_fails_has_its_error_and_is_done_again_alone(broker: Broker, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    kwargs = {"witness": str(witness), "bad": "fail 3"}
    options: dict[str, Any] = {"max_parallel": 1, "cpu": 0.1}
    submitted = broker.submit_array(ITEM, range(6), kwargs=kwargs, item_retries=1, **options)
    array = ended(broker, submitted)
    assert (array.state, array.total, array.done, array.failed) == ("failed", 6, 6, 1)
    found = items(broker, array)
    assert [item.result for item in found] == [0, 1, 4, None, 16, 25]
    assert found[3].error is not None
    assert found[3].error.message == "ValueError: item 3 is bad"
    assert "note_item" in (found[3].error.traceback or "")
    assert found[3].tries == 2
    assert [item.number for item in broker.array_items(array, state="failed")] == [3]
    with pytest.raises(ItemFailed, match=r"item 3 of array .* failed"):
        _ = found[3].value

    witness.unlink()
    again = ended(broker, broker.retry_array(array))
    assert (again.retry_of, again.total, again.failed) == (array.id, 1, 1)
    assert {item for _, item in lines(witness)} == {3}


def test_a_command_runs_for_each_item(broker: Broker, tmp_path: Path) -> None:
    script = "import sys, pathlib; pathlib.Path(sys.argv[1]).touch(); sys.exit(sys.argv[2] == 'bad')"
    command = [sys.executable, "-c", script, "{}", "{}"]
    names = [str(tmp_path / "one"), str(tmp_path / "two")]
    array = ended(broker, broker.submit_array(command, names, cpu=0.1, max_parallel=1))
    with pytest.raises(Refused, match="every item"):
        broker.retry_array(array)
    assert array.state == "succeeded"
    assert [item.result for item in items(broker, array)] == [{"exit_code": 0}] * 2
    assert all(Path(name).exists() for name in names)
    slow = broker.submit_array(["sleep"], ["600", "0"], item_timeout_seconds=0.3, cpu=0.1, max_parallel=1)
    first, second = items(broker, ended(broker, slow))
    assert first.error is not None
    assert (first.error.kind, second.result) == ("timeout", {"exit_code": 0})


@pytest.mark.parametrize("how", ["spin", "hang"])
def test_an_item_that_takes_too_long_fails_and_the_others_are_done(
    broker: Broker, tmp_path: Path, how: str
) -> None:
    """In Python code it is interrupted; otherwise its process ends with it. It is tried again."""
    kwargs = {"witness": str(tmp_path / "witness"), "bad": f"{how} 2"}
    options: dict[str, Any] = {"item_timeout_seconds": 0.5, "item_retries": 1}
    submitted = broker.submit_array(ITEM, range(5), kwargs=kwargs, max_parallel=1, cpu=0.1, **options)
    array = ended(broker, submitted)
    found = items(broker, array)
    assert [item.error.kind if item.error else item.result for item in found] == [0, 1, "timeout", 9, 16]
    calls = lines(tmp_path / "witness")
    assert (found[2].tries, [item for _, item in calls].count(2)) == (2, 2)
    assert len({pid for pid, _ in calls}) == (1 if how == "spin" else 3)


def test_items_of_killed_workers_are_done_by_others_with_one_result_each(
    broker: Broker, tmp_path: Path
) -> None:
    witness = tmp_path / "witness"
    kwargs = {"witness": str(witness), "pause_seconds": 0.01, "bad": "crash 250"}
    array = broker.submit_array(ITEM, range(300), kwargs=kwargs, max_parallel=2, cpu=0.1)
    until(lambda: len({pid for pid, _ in lines(witness)}) == 2, "both workers are at work")
    os.kill(lines(witness)[-1][0], signal.SIGKILL)
    array = ended(broker, array)
    found = items(broker, array)
    assert [item.number for item in found if item.error] == [250]
    assert found[250].error is not None
    assert found[250].error.kind == "killed"
    assert [item.result for item in found if not item.error] == [n * n for n in range(300) if n != 250]


def test_finished_item_has_its_result_at_once_and_is_not_done_again(broker: Broker, tmp_path: Path) -> None:
    """The next item runs at that moment."""
    witness, gate = tmp_path / "witness", tmp_path / "gate"
    kwargs = {"witness": str(witness), "gate": str(gate)}
    job = "tests.e2e.work:crash_when_told"
    array = broker.submit_array(job, range(2), kwargs=kwargs, max_parallel=1, chunk=2, cpu=0.1)
    until(lambda: [item.number for item in items(broker, array)] == [0], "the first item has its result")
    assert [item for _, item in lines(witness)] == [0, 1], "the second one runs"
    gate.touch()
    first, second = items(broker, ended(broker, array))
    assert (first.state, second.error and second.error.kind) == ("succeeded", "killed")
    assert [item for _, item in lines(witness)].count(0) == 1


def test_a_preempted_worker_loses_none_of_its_finished_items(broker: Broker, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    kwargs = {"witness": str(witness), "pause_seconds": 0.02}
    options: dict[str, Any] = {"gpu_mb": 20 * GIB, "priority": "background", "max_parallel": 1}
    array = broker.submit_array(ITEM, range(150), kwargs=kwargs, **options)
    until(lambda: broker.array(array).done > 10, "some items are done")
    urgent = [broker.submit("tests.e2e.work:add", 20, 22, gpus=1, priority="critical") for _ in range(2)]
    for task in urgent:
        assert broker.result(task, timeout_seconds=PATIENCE_SECONDS) == 42
    array = ended(broker, array)
    assert array.state == "succeeded"
    assert broker.get(array.workers[0].id).preemptions == 1
    assert [item.result for item in items(broker, array)] == [n * n for n in range(150)]
    calls = [item for _, item in lines(witness)]
    assert len(calls) - len(set(calls)) <= 1, "at most the item that was broken off ran again"


def test_an_array_goes_on_when_the_service_is_killed_and_started_again(
    service: ServiceProcess, tmp_path: Path
) -> None:
    kwargs = {"witness": str(tmp_path / "witness"), "pause_seconds": 0.01}
    array = service.broker.submit_array(ITEM, range(400), kwargs=kwargs, max_parallel=2, cpu=0.1)
    until(lambda: service.broker.array(array).done > 20, "some items are done")
    service.kill_9()
    service.start()
    array = ended(service.broker, array)
    assert array.state == "succeeded"
    assert [item.result for item in items(service.broker, array)] == [n * n for n in range(400)]


def test_a_cancelled_array_keeps_its_results(broker: Broker, tmp_path: Path) -> None:
    kwargs = {"witness": str(tmp_path / "witness"), "pause_seconds": 0.05}
    array = broker.submit_array(ITEM, range(10_000), kwargs=kwargs, max_parallel=2, cpu=0.1)
    until(lambda: broker.array(array).done > 5, "some items are done")
    broker.cancel_array(array)
    array = ended(broker, array)
    assert array.state == "cancelled"
    assert 5 < array.done < 10_000
    assert len(items(broker, array)) == array.done
    again = broker.retry_array(array)
    assert again.total == 10_000 - array.done
    broker.cancel_array(again)
    ended(broker, again)
