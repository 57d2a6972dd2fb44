"""Who comes first, who may pass, and that what is told beforehand comes true, on real Ray."""

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gpubroker import Task

from tests.e2e.hands import BIG, PATIENCE_SECONDS, Hands
from tests.e2e.service_process import GIB, ServiceProcess, until

WHOLE: dict[str, Any] = {"gpus": 1, **BIG}


def began_at(task: Task) -> datetime:
    assert task.started_at is not None
    return task.started_at


def test_a_task_that_is_simulated_starts_where_it_was_said(hands: Hands) -> None:
    told = hands.broker.simulate(gpu_mb=4096, pool="fast")
    assert told.verdict == "starts"
    task = hands.at_work("task", gpu_mb=4096, pool="fast")
    assert [place.node for place in told.places] == [task.node]
    assert [device.key.rpartition("/")[2] for device in told.places[0].devices] == [task.devices[0].uuid]
    hands.end(task)


def test_simulated_task_later_stops_the_run_it_named_and_none_before(hands: Hands) -> None:
    broker = hands.broker
    victim = hands.at_work("victim", priority="background", **WHOLE)
    waits = broker.simulate(priority="background", **WHOLE)
    assert (waits.verdict, waits.reason) == ("waits", "WaitingForMemory")
    told = broker.simulate(priority="critical", **WHOLE)
    assert (told.verdict, [run.id for run in told.victims]) == ("preempts", [victim.id])
    assert broker.get(victim).state == "running"
    urgent = hands.at_work("urgent", priority="critical", **WHOLE)
    assert broker.get(victim).preemptions == 1
    hands.end(urgent, victim)


def test_small_tasks_fill_a_gap_and_the_wide_one_starts_as_it_was_told(hands: Hands) -> None:
    broker = hands.broker
    ahead = hands.at_work("ahead", gpu_mb=60 * GIB, expected_seconds=600, **BIG)
    wide = hands.waiting("wide", "WaitingForMemory", **WHOLE)
    until(lambda: (told := broker.get(wide).pending) is not None and told.start is not None, "it is told")
    pending = broker.get(wide).pending
    assert pending is not None
    assert pending.start is not None
    quick = hands.at_work("quick", gpu_mb=4096, expected_seconds=30, **BIG)
    slow = hands.waiting("slow", "BehindHigherPriority", gpu_mb=4096, expected_seconds=6000, **BIG)
    _, ended = hands.end(quick, ahead)
    until(lambda: broker.get(wide).state == "running", "the wide one runs")
    assert broker.get(slow).state == "pending"
    assert pending.start.p90_at is not None
    assert began_at(broker.get(wide)) <= pending.start.p90_at
    assert ended.finished_at is not None
    assert began_at(broker.get(wide)) - ended.finished_at < timedelta(seconds=10), "as soon as there is room"
    hands.end(wide, slow)


def test_the_heavier_stream_goes_first(hands: Hands) -> None:
    ahead = hands.at_work("ahead", **WHOLE)
    nightly = hands.waiting("nightly", "WaitingForMemory", stream="nightly", **WHOLE)
    release = hands.waiting("release", "WaitingForMemory", stream="release", **WHOLE)
    hands.let_go(ahead, nightly, release)
    until(lambda: hands.broker.get(nightly).state == "succeeded", "all are done")
    assert began_at(hands.broker.get(release)) < began_at(hands.broker.get(nightly))


def test_whoever_has_had_less_of_its_share_goes_first(two_nodes: ServiceProcess, tmp_path: Path) -> None:
    greedy, modest = (Hands(two_nodes.of(name), tmp_path) for name in ("greedy", "modest"))
    ahead = greedy.at_work("ahead", **WHOLE)
    more = greedy.waiting("more", "WaitingForMemory", **WHOLE)
    first = modest.waiting("first", "WaitingForMemory", **WHOLE)

    def used() -> float:
        return greedy.broker.tenants().items[0].usage_mb_seconds

    until(lambda: used() > 40 * GIB, "it has had a whole GPU for a while")
    greedy.let_go(ahead, more)
    modest.let_go(first)
    until(lambda: greedy.broker.get(more).state == "succeeded", "all are done")
    assert began_at(modest.broker.get(first)) < began_at(greedy.broker.get(more))


def test_a_tenant_runs_no_more_at_once_than_it_may(two_nodes: ServiceProcess, tmp_path: Path) -> None:
    guest = Hands(two_nodes.of("guest"), tmp_path)
    one = guest.at_work("one", cpu=0.1)
    other = guest.waiting("other", "ConcurrencyLimited", cpu=0.1)
    guest.end(one, other)


def test_a_task_waits_for_its_time(hands: Hands) -> None:
    now = datetime.fromtimestamp(time.time(), UTC)
    task = hands.waiting("task", "NotBefore", not_before=now + timedelta(hours=1), cpu=0.1)
    hands.let_go(task)
    at = datetime.fromtimestamp(time.time() + 1.0, UTC)
    hands.broker.change(task, not_before=at)
    assert began_at(hands.broker.wait(task, timeout_seconds=PATIENCE_SECONDS)) >= at
