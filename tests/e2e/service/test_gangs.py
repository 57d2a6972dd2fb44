"""Tasks of several processes on real Ray, as their users see them: all together or none."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gpubroker import Broker, Task, TaskFailed

from examples import elastic
from tests.e2e.hands import Hands
from tests.e2e.service_process import until
from tests.e2e.work import lines_of, note
from tests.patience import PATIENCE_SECONDS

FOUR = [{"count": 4, "gpu_mb": 10_000}]
"""Two ranks on each of the two devices."""


def _is_told(witness: str, news: str) -> bool:
    return news in lines_of(witness)


@pytest.fixture
def witness(tmp_path: Path) -> str:
    path = tmp_path / "witness"
    path.touch()
    return str(path)


def a_gang(broker: Broker, work: str, *args: Any, **options: Any) -> Task:
    options = {"bundles": FOUR, "grace_seconds": 20, **options}
    return broker.submit(f"tests.e2e.work:{work}", *args, **options)


def is_free(broker: Broker) -> bool:
    return all(gpu.leased_mb == 0 for gpu in broker.gpus())


def test_four_ranks_find_each_other_and_add_up_their_numbers(broker: Broker) -> None:
    gang = a_gang(broker, "add_up", 2.5)
    assert broker.result(gang, timeout_seconds=PATIENCE_SECONDS) == 25.0
    until(lambda: is_free(broker), "all ranks gave their memory back")


def test_a_rank_that_fails_stops_the_others_and_is_named(broker: Broker, witness: str) -> None:
    gang = a_gang(broker, "fail_on", 2, witness)
    with pytest.raises(TaskFailed) as failed:
        broker.result(gang, timeout_seconds=PATIENCE_SECONDS)
    assert "rank 2" in failed.value.message
    assert sorted(line for line in lines_of(witness) if "stopped" in line) == [
        "0 stopped",
        "1 stopped",
        "3 stopped",
    ]
    until(lambda: is_free(broker), "all ranks gave their memory back")


def test_a_cancel_stops_all_ranks(broker: Broker, witness: str) -> None:
    gang = a_gang(broker, "stay", witness)
    until(lambda: len(lines_of(witness)) == 4, "all ranks are at work")
    broker.cancel(gang)
    assert broker.wait(gang, timeout_seconds=PATIENCE_SECONDS).state == "cancelled"
    until(lambda: is_free(broker), "all ranks gave their memory back")


def test_a_rank_that_is_shot_takes_the_others_with_it_and_all_come_again(
    broker: Broker, witness: str
) -> None:
    gang = a_gang(broker, "stay", witness, max_retries=1)
    until(lambda: len(lines_of(witness)) == 4, "all ranks are at work")
    [pid] = [int(line.split()[1]) for line in lines_of(witness) if line.startswith("3 ")]
    os.kill(pid, signal.SIGKILL)
    done = broker.wait(gang, timeout_seconds=PATIENCE_SECONDS)
    assert (done.state, done.attempt, done.failures) == ("succeeded", 2, 1)
    assert len(lines_of(witness)) == 4
    until(lambda: is_free(broker), "all ranks gave their memory back")


@pytest.mark.parametrize("amount", ["gpu_mb", pytest.param("cpu", marks=pytest.mark.evidence)])
def test_elastic_gang_gives_ranks_up_and_regains_them_when_there_is_room(
    broker: Broker, witness: str, amount: str
) -> None:
    [node] = broker.nodes()
    cpus = node.cpu.total
    of_one, of_two = {"gpu_mb": (10_000, 20_000), "cpu": (cpus / 4, cpus / 2)}[amount]
    options: dict[str, Any] = {"bundles": [{"count": 4, amount: of_one}], "priority": "background"}
    gang = a_gang(broker, "go_on_with_those_at_work", witness, min_ranks=2, **options)
    until(lambda: len(lines_of(witness)) == 4, "all ranks are at work")
    wants: dict[str, Any] = {amount: of_two}
    urgent = broker.submit("tests.e2e.work:add", 20, 22, priority="critical", **wants)
    assert broker.result(urgent, timeout_seconds=PATIENCE_SECONDS) == 42
    for rank in (0, 1):
        until(partial(_is_told, witness, f"{rank} works with (0, 1) in 2"), "it heard which ranks are left")
    assert {"2 left", "3 left"} <= set(lines_of(witness))
    for rank in (0, 1, 4, 5):
        news = f"{rank} works with (0, 1, 4, 5) in 4"
        until(partial(_is_told, witness, news), "it heard which ranks have joined")
    shown = broker.get(gang)
    assert shown.ranks is not None
    assert [rank.state for rank in shown.ranks] == [
        "running", "running", "left", "left", "running", "running",
    ]  # fmt: skip
    note(witness, "enough")
    assert broker.result(gang, timeout_seconds=PATIENCE_SECONDS) == [0, 1, 4, 5]
    assert (broker.get(gang).preemptions, broker.get(gang).attempt) == (0, 1)
    until(lambda: is_free(broker), "all ranks gave their memory back")


def test_the_elastic_example_takes_a_rank_in_as_soon_as_a_gpu_is_free(
    broker: Broker, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hands = Hands(broker, tmp_path)
    other, told = hands.at_work("other", gpus=1), list[str]()

    def has_told(pattern: str) -> bool:
        told.append(capfd.readouterr().out)
        return re.search(pattern, "".join(told)) is not None

    with ThreadPoolExecutor(1) as thread:
        fitted = thread.submit(elastic.run, broker, enough=2)
        until(lambda: has_told(r"step \d+ by rank 0: y = "), "it goes on with one rank")
        hands.end(other)
        steps = fitted.result(PATIENCE_SECONDS)
    assert has_told(rf"rank 1 has joined\nstep {steps} by rank 0, 1: y = ")
    task = next(task for task in broker.list() if task.ranks)  # The newest is listed first.
    assert (task.state, task.attempt) == ("succeeded", 1)


def test_a_gang_gives_way_as_a_whole_and_resumes_as_a_whole(
    broker: Broker, witness: str, tmp_path: Path
) -> None:
    enough = tmp_path / "enough"
    gang = a_gang(broker, "count_together", witness, str(enough), priority="background")
    until(lambda: len(lines_of(witness)) == 4, "all ranks are at work")
    until(lambda: broker.get(gang).checkpoint_at is not None, "rank 0 has saved")
    urgent = broker.submit("tests.e2e.work:add", 20, 22, gpu_mb=20_000, priority="critical")
    assert broker.result(urgent, timeout_seconds=PATIENCE_SECONDS) == 42
    until(lambda: len(lines_of(witness)) == 8, "all ranks are at work again")
    enough.touch()
    counted = broker.result(gang, timeout_seconds=PATIENCE_SECONDS)
    assert counted["steps"] >= counted["begun_at"] > 0
    assert (broker.get(gang).preemptions, broker.get(gang).failures) == (1, 0)
    resumed = [line.split() for line in lines_of(witness)][4:]
    assert sorted(rank for rank, _, _ in resumed) == ["0", "1", "2", "3"]
    assert {int(step) for _, _, step in resumed} == {counted["begun_at"]}
