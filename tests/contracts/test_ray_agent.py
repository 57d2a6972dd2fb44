"""What a node agent answers, refuses and remembers, on runners that only wait."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpubroker.runtime.messages import PROTOCOL, RunKey, RunOrder, checkpointed, ended, failed, started
from gpubroker_server.adapters.ray.agent import node_agent, runner_pool
from gpubroker_server.adapters.ray.agent.run_files import RunFiles, RunRecord, UnreadableRecord
from gpubroker_server.adapters.ray.options import AgentConfig
from gpubroker_server.adapters.ray.processes import boot_id, process_id
from gpubroker_server.adapters.ray.wire import MEASURE
from msgspec.structs import replace
from ray.exceptions import RaySystemError
from structlog.testing import capture_logs

from tests.contracts.fake_runners import GPU, FakeRunners, Leader, Runner
from tests.patience import PATIENCE_SECONDS

OpenLeader = Callable[..., Leader]


def files_of(config: AgentConfig) -> Path:
    return Path(config.run_dir) / config.node


def leave_a_run(runners: FakeRunners, config: AgentConfig, task: str) -> Runner:
    """As a killed agent leaves it: its runner lives, its record is there."""
    name, runner = runners.make(shared=False)
    record = RunRecord(
        task, 1, 0, ((GPU, 1000),), name, *process_id(runner.process.pid), runners.node, PROTOCOL
    )
    RunFiles(files_of(config), boot_id()).write_record(record)
    assert isinstance(runner, Runner)
    return runner


def runs_seen(leader: Leader) -> list[tuple[str, int]]:
    return list([report[4] for report in leader.received if report[0] == "node_seen"][-1])


async def test_an_agent_does_not_answer_while_a_record_cannot_be_read(
    runners: FakeRunners, open_leader: OpenLeader
) -> None:
    leader = open_leader()
    leave_a_run(runners, leader.config, "left")
    broken = files_of(leader.config) / f"broken-1-0@{boot_id()}.json"
    broken.write_text("")
    for _ in range(2):
        with pytest.raises(UnreadableRecord, match=r"broken-1-0.*remove the file"):
            await leader.announce()
    broken.unlink()
    assert await leader.announce() == "welcome"
    await leader.receive("node_seen")
    assert runs_seen(leader) == [("left", 1, 0)]


async def test_an_agent_does_not_answer_while_ray_cannot_list_its_actors(
    runners: FakeRunners, open_leader: OpenLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = open_leader()
    leave_a_run(runners, leader.config, "left")

    def away() -> list[str]:
        raise RaySystemError("the control service is away")  # type: ignore[no-untyped-call]  # Ray has no types

    with monkeypatch.context() as ray:
        ray.setattr(runners, "names", away)
        for _ in range(2):
            with pytest.raises(RaySystemError):
                await leader.announce()
    assert await leader.announce() == "welcome"
    await leader.receive("node_seen")
    assert runs_seen(leader) == [("left", 1, 0)]


async def test_an_adopted_run_is_listened_to_and_proven_gone_with_a_measurement(
    runners: FakeRunners, open_leader: OpenLeader
) -> None:
    leader = open_leader()
    runner = leave_a_run(runners, leader.config, "left")
    await leader.announce()
    await leader.until(lambda: runner._mailbox)
    runner.report(ended(RunKey("left", 1, 0), failed("exception", "no"), b""))
    gone = await leader.receive("gone", "left")
    assert gone[5:] == ("process_absent", ((GPU, 0, 0, {}, 0.0),))
    await leader.until(lambda: not list(files_of(leader.config).glob("*.json")))
    assert runner.process.poll() is not None


async def test_a_damaged_record_of_an_earlier_boot_is_ignored(
    runners: FakeRunners, open_leader: OpenLeader
) -> None:
    leader = open_leader()
    files_of(leader.config).mkdir(parents=True)
    (files_of(leader.config) / "old-1-0@another-boot.json").write_text("")
    assert await leader.announce() == "welcome"
    assert list(files_of(leader.config).iterdir()) == []


async def test_a_run_without_a_record_is_known_by_the_description_of_its_runner(
    runners: FakeRunners, open_leader: OpenLeader
) -> None:
    _, runner = runners.make(shared=False)
    runner.runs = [RunOrder(task="left", fence=1, kind="entrypoint", leases=((GPU, 1000),))]
    leader = open_leader()
    await leader.announce()
    await leader.receive("node_seen")
    assert runs_seen(leader) == [("left", 1, 0)]
    assert runner.process.poll() is None


async def test_blank_runners_of_an_earlier_agent_are_ended(
    runners: FakeRunners, open_leader: OpenLeader
) -> None:
    _, runner = runners.make(shared=False)
    leader = open_leader()
    await leader.announce()
    await leader.until(lambda: runner.process.poll() is not None)


async def test_an_older_term_that_waited_while_a_newer_one_was_adopted_is_stale(
    runners: FakeRunners, open_leader: OpenLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = open_leader()
    newer.term = 6
    older = Leader(newer.agent, newer.config, term=5)
    asked, go_on = threading.Event(), threading.Event()

    def names() -> list[str]:
        asked.set()
        assert go_on.wait(PATIENCE_SECONDS)
        return []

    monkeypatch.setattr(runners, "names", names)
    announcing = asyncio.create_task(newer.announce())
    await newer.until(asked.is_set)
    too_late = asyncio.create_task(older.announce())
    await asyncio.sleep(0)
    go_on.set()
    assert (await announcing, await too_late) == ("welcome", "stale")


async def test_a_malformed_report_of_one_run_does_not_affect_another(
    runners: FakeRunners, open_leader: OpenLeader
) -> None:
    leader = open_leader(warm_runners=1)
    await leader.announce()
    for task in "ab":
        await leader.start(task, shareable=True)
    await leader.until(lambda: len(runners.started) == 2)
    [runner] = runners.made
    runner.report(("checkpointed", "a", 1, 0, 1.0, 7, "abc", None, {"no": "address"}))
    runner.report(("nonsense",), ("ended", "b", "one", 0, 1.0))
    runner.report(ended(RunKey("b", 1, 0), failed("exception", "no"), b""))
    await leader.receive("gone", "b")
    assert leader.kinds_of("a") == []


async def test_the_newest_of_the_unfetched_checkpoints_is_kept(open_leader: OpenLeader) -> None:
    leader = open_leader()
    await leader.announce()
    key = RunKey("t", 1, 0)
    leader.agent.report(started(key, 42))
    for number in range(50):
        leader.agent.report(checkpointed(key, number, "abc", b"state", None))
    leader.agent.report(ended(key, failed("exception", "no"), b""))
    await leader.receive("ended")
    assert leader.kinds_of("t") == ["started", "checkpointed", "ended"]
    assert (await leader.receive("checkpointed"))[5] == 49


async def test_waiting_starts_are_served_by_priority_then_in_order_of_arrival(
    runners: FakeRunners, open_leader: OpenLeader
) -> None:
    leader = open_leader()
    await leader.announce()
    for task, priority in ("a", 10), ("b", 90), ("c", 10), ("d", 90):
        await leader.start(task, priority=priority)
    await leader.until(lambda: len(runners.started) == 4)
    assert runners.started == ["b", "d", "a", "c"]


async def test_run_whose_record_cannot_be_written_never_starts(
    runners: FakeRunners, open_leader: OpenLeader
) -> None:
    """Its process gets the next run."""
    leader = open_leader()
    await leader.announce()
    (files_of(leader.config) / "full-1-0.new").mkdir()
    await leader.start("full", leases=((GPU, 1000),))
    assert (await leader.receive("ended", "full"))[5] == "never_started"
    assert (await leader.receive("gone", "full"))[5] == "never_started"
    await leader.start("next")
    await leader.until(lambda: runners.started == ["next"])


async def test_devices_are_measured_at_once_when_the_leader_asks(
    open_leader: OpenLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_agent, "FIRST_SAMPLE_SECONDS", 1e6)
    leader = open_leader(sample_period_seconds=1e6)
    await leader.announce()
    for _ in range(3):
        asked_at = time.time()
        await leader.order(*MEASURE)
        while (await leader.receive("sampled"))[1] < asked_at:
            leader.received.clear()


async def test_an_order_that_fails_is_reported_after_the_others_were_carried_out(
    runners: FakeRunners, open_leader: OpenLeader
) -> None:
    leader = open_leader(warm_runners=1)
    await leader.announce()
    with pytest.raises(ValueError, match="1 orders could not be carried out"):
        await leader.order("start", leader.incarnation, True, {"no": "order"})
    await leader.start("next", shareable=True)
    await leader.until(lambda: runners.started == ["next"])


async def test_an_agent_that_is_not_polled_ends_and_leaves_nothing(
    runners: FakeRunners, open_leader: OpenLeader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(node_agent, "DESERTED_SECONDS", 0.0)
    leader = open_leader(warm_runners=1, idle_stop_seconds=0.0, sample_period_seconds=0.01)
    await leader.announce()
    await leader.until(lambda: left)
    assert left == [0]
    await leader.until(lambda: not runners.names())
    assert os.listdir(tmp_path) == []


async def test_an_agent_that_is_to_be_replaced_takes_no_run_and_loses_none(
    runners: FakeRunners, open_leader: OpenLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[Any] = []
    has_process = asyncio.Event()
    monkeypatch.setattr(os, "_exit", left.append)
    runners.on_start = lambda runner: setattr(runner, "answers", has_process)
    leader = open_leader()
    await leader.announce()
    assert (await leader.receive("node_seen"))[2]["max_runs"] == 10
    await leader.start("waits")
    wanted = Leader(leader.agent, replace(leader.config, max_runs=7), term=2)
    assert await wanted.announce() == "welcome"
    assert (await wanted.receive("node_seen"))[2]["max_runs"] == 0
    assert (left, runners.started) == ([], [])
    has_process.set()
    await wanted.until(lambda: runners.started == ["waits"])
    await wanted.until(lambda: left)


async def test_a_process_that_never_answers_is_killed_and_another_is_started(
    runners: FakeRunners, open_leader: OpenLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_pool, "START_SECONDS", 0.05)
    monkeypatch.setattr(runner_pool, "RETRY_PAUSE_SECONDS", 0.0)

    def mute_at_first(runner: Runner) -> None:
        if len(runners.made) < runner_pool.STARTING_AT_ONCE:
            runner.answers.clear()

    runners.on_start = mute_at_first
    leader = open_leader()
    await leader.announce()
    for task in "abc":
        await leader.start(task)
    await leader.until(lambda: len(runners.started) == 3)
    mute = [runner.process for runner in runners.made if not runner.answers.is_set()]
    assert len(mute) == runner_pool.STARTING_AT_ONCE
    assert [process.wait(PATIENCE_SECONDS) for process in mute] == [-signal.SIGKILL] * len(mute)


async def test_a_process_that_starts_slowly_and_gets_on_is_waited_for(
    runners: FakeRunners, open_leader: OpenLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_pool, "START_SECONDS", 0.02)
    runners.gets_on = True
    runners.on_start = lambda runner: runner.answers.clear()
    leader = open_leader()
    await leader.announce()
    await leader.start("slow")
    await leader.until(lambda: runners.looks > 5)
    [slow] = runners.made
    assert slow.process.poll() is None
    slow.answers.set()
    await leader.until(lambda: runners.started == ["slow"])
    assert runners.made == [slow], "no other one was started"


async def test_processes_start_one_at_a_time_while_starts_are_slow(
    runners: FakeRunners, open_leader: OpenLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_pool, "SLOW_SECONDS", -1.0)
    at_once = runner_pool.STARTING_AT_ONCE
    beside: list[int] = []

    def wait_for_the_test(runner: Runner) -> None:
        beside.append(sum(not other.answers.is_set() for other in runners.made))
        if len(runners.made) >= at_once:
            runner.answers.clear()

    runners.on_start = wait_for_the_test
    leader = open_leader()
    await leader.announce()
    for task in "abcde":
        await leader.start(task)
    for count in range(at_once + 1, 6):
        await leader.until(lambda: len(runners.made) == count)  # noqa: B023  # it is called at once
        runners.made[-1].answers.set()
    await leader.until(lambda: len(runners.started) == 5)
    assert beside == [0] * 5


async def test_idle_warm_runner_of_an_earlier_agent_is_ended(
    runners: FakeRunners, open_leader: OpenLeader
) -> None:
    _, idle = runners.make(shared=True)
    leader = open_leader(warm_runners=1)
    await leader.announce()
    await leader.until_noted(idle)
    await leader.until(lambda: leader.pool.ready)


async def test_earlier_agents_warm_runner_finishes_its_runs_and_takes_no_new_one(
    runners: FakeRunners, open_leader: OpenLeader
) -> None:
    """It was started with that agent's user and paths, which may have changed since."""
    _, old = runners.make(shared=True)
    old.runs = [RunOrder(task="left", fence=1, kind="entrypoint")]
    leader = open_leader(warm_runners=1)
    await leader.announce()
    await leader.start("new", shareable=True)
    await leader.until(lambda: "new" in runners.started)
    assert runners.runner_of("new") is not old

    old.report(ended(RunKey("left", 1, 0), failed("exception", "no"), b""))
    await leader.receive("gone", "left")
    await leader.until_noted(old)


async def test_a_rank_has_a_process_of_its_own_and_gets_go_after_its_start(
    runners: FakeRunners, open_leader: OpenLeader
) -> None:
    leader = open_leader(warm_runners=1)
    await leader.announce()
    await leader.start("gang", shareable=True, rank=1, world_size=2, barrier=True)
    await leader.order("go", "gang", 1, 1, "10.0.0.7:4711")
    await leader.until(lambda: "gang" in runners.started)
    runner = runners.runner_of("gang")
    assert [item[0] for item in runner.items] == ["own", "go"]
    assert runner.items[0][-2:] == (runners.host, leader.config.node)
    assert runner.items[1][1:] == (("gang", 1, 1), "10.0.0.7:4711")


async def test_a_rank_learns_which_ranks_are_at_work_from_the_newest_leader_only(
    runners: FakeRunners, open_leader: OpenLeader
) -> None:
    newer = open_leader()
    newer.term = 2
    await newer.announce()
    await newer.order("world", "gang", 1, 0, (0, 1))  # nobody has received of it here
    await newer.start("gang", world_size=3, barrier=True)
    await newer.order("go", "gang", 1, 0, "10.0.0.7:4711")
    await newer.until(lambda: "gang" in runners.started)
    older = Leader(newer.agent, newer.config, term=1)
    await older.order("world", "gang", 1, 0, (0,))
    await newer.order("world", "gang", 1, 0, (0, 1))
    await newer.order("resized", "gang", 1, 0, (0, 1, 3), 2)
    runner = runners.runner_of("gang")
    await newer.until(lambda: len(runner.items) > 3)
    assert runner.items[2:] == [
        ("world", ("gang", 1, 0), (0, 1)), ("resized", ("gang", 1, 0), (0, 1, 3), 2),
    ]  # fmt: skip


async def test_the_go_of_an_older_leader_is_refused(runners: FakeRunners, open_leader: OpenLeader) -> None:
    newer = open_leader()
    newer.term = 2
    await newer.announce()
    await newer.start("gang", world_size=2, barrier=True)
    await newer.until(lambda: "gang" in runners.started)
    older = Leader(newer.agent, newer.config, term=1)
    await older.order("go", "gang", 1, 0, "10.0.0.7:4711")
    await newer.order("go", "gang", 1, 0, "10.0.0.8:4711")
    await newer.until(lambda: len(runners.runner_of("gang").items) > 1)
    assert runners.runner_of("gang").items[1][2] == "10.0.0.8:4711"


async def test_the_stop_of_an_older_leader_is_refused_and_logged(
    runners: FakeRunners, open_leader: OpenLeader
) -> None:
    newer = open_leader()
    newer.term = 2
    await newer.announce()
    await newer.start("run")
    await newer.until(lambda: "run" in runners.started)
    older = Leader(newer.agent, newer.config, term=1)
    with capture_logs() as lines:
        await older.stop("run", grace_seconds=60.0)
        await newer.stop("run", grace_seconds=50.0)
    runner = runners.runner_of("run")
    await newer.until(lambda: len(runner.items) > 1)
    assert [item[0] for item in runner.items] == ["own", "stop"]
    [refused] = [leader for leader in lines if leader["event"] == "refused: orders of a term that is over"]
    assert (refused["term"], refused["fault"]) == (1, "it is term 2 of lineage 0")


async def test_a_run_that_is_taken_over_repeats_its_reports(
    runners: FakeRunners, open_leader: OpenLeader
) -> None:
    leader = open_leader()
    runner = leave_a_run(runners, leader.config, "left")
    await leader.announce()
    await leader.until(lambda: runner.items)
    assert runner.items == [("retell", ("left", 1, 0))]
