"""`python -m bench cost`: no operation takes more than its bound, and two counts are the same."""

import json
import subprocess
import sys

import pytest

from bench import cost
from bench.cost import bounds
from bench.cost.bounds import GRAIN_CALLS, Bound, faults_of

PYTHON = sys.version_info[:2]

TWO_PROCESSES = """
import asyncio, json, time
from bench.cost.virtual_time import VirtualClock, VirtualLoop, WorkOfThreads
clock = VirtualClock()
clock.install()
work = WorkOfThreads()
work.watch_executors()
from bench.cost.counting import AGENT, DRIVER, CallCounter
from bench.cost.ray_stand_in import begin_in

def called():
    return len("")

async def call(times):
    for _ in range(times):
        called()

async def call_in_thread(times):
    await asyncio.to_thread(lambda: [called() for _ in range(times)])

async def main(counter):
    began = clock.seconds
    counter.begin()
    await asyncio.gather(
        begin_in(DRIVER, lambda: call(7)),
        begin_in(AGENT, lambda: call_in_thread(11)),
        asyncio.sleep(3600.0),
    )
    counts = counter.end()
    calls = {}
    for name in (DRIVER, AGENT):
        found = dict(counts.most_called(name, 100))
        calls[name] = found["<string>:called"] + found["<string>:called (C)"]
    print(json.dumps([calls, clock.seconds - began]))

counter = CallCounter()
counter.install()
VirtualLoop(clock, work).run_until_complete(main(counter))
"""


def test_no_operation_takes_more_than_its_bounds() -> None:
    figures: dict[str, float] = {}
    for found in cost.count(cost.SCENES):
        figures |= cost.figures_of(found)
    assert not list(faults_of(figures, PYTHON)), "\n".join(faults_of(figures, PYTHON))


def test_two_counts_of_a_path_are_equal() -> None:
    first, second = (cost.count(["inference"])[0]["calls"] for _ in range(2))
    assert first == pytest.approx(second, abs=GRAIN_CALLS)  # a periodic job may fall into one of them
    assert first["service"] > 50


def test_calls_count_for_the_process_of_their_task_or_thread() -> None:
    ran = subprocess.run([sys.executable, "-c", TWO_PROCESSES], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    # Each call of the function calls one function of C.
    assert json.loads(ran.stdout) == [{"driver": 14, "agent": 22}, 3600.0]


@pytest.fixture
def a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"run.agent.calls": Bound(100.0, 100.0, "why"), "run.agent.live_bytes": Bound(100.0, 100.0, "why")}
    monkeypatch.setattr(bounds, "BOUNDS", {(3, 0): rows})


@pytest.mark.usefixtures("a_table")
def test_a_count_within_the_tolerance_is_no_fault() -> None:
    assert not list(faults_of({"run.agent.calls": 102.0, "run.agent.live_bytes": 117.0}, (3, 0)))


@pytest.mark.usefixtures("a_table")
def test_a_count_above_its_bound_names_the_row_and_asks_why() -> None:
    [fault] = faults_of({"run.agent.calls": 102.2, "run.agent.live_bytes": 1.0}, (3, 0))
    assert "run.agent.calls is 102.20, and its bound is 100.00" in fault
    assert 'the row "run.agent.calls" of BOUNDS[(3, 0)] in bench/cost/bounds.py' in fault
    assert "why the operation has to take more" in fault


@pytest.mark.usefixtures("a_table")
def test_figures_and_rows_that_have_no_counterpart_are_faults() -> None:
    faults = list(faults_of({"run.agent.calls": 1.0, "run.driver.calls": 1.0}, (3, 0)))
    assert len(faults) == 2
    assert "run.driver.calls is 1.00 and has no row" in faults[0]
    assert "run.agent.live_bytes was not counted" in faults[1]


def test_a_python_without_a_table_is_a_fault() -> None:
    [fault] = faults_of({"run.agent.calls": 1.0}, (2, 7))
    assert "there is no BOUNDS[(2, 7)]" in fault


def test_every_row_has_a_reason() -> None:
    rows = [bound for table in bounds.BOUNDS.values() for bound in table.values()]
    assert rows
    assert all(row.reason and row.most > 0 for row in rows)
