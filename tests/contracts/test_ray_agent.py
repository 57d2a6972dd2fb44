"""What a node agent answers, refuses and never forgets, on runners that only wait."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from gpubroker.runtime.messages import RunKey, RunOrder, checkpointed, ended, failed, started
from gpubroker_server.adapters.ray.agent import node_agent, runner_pool
from gpubroker_server.adapters.ray.agent.run_records import Card, RunFiles, UnreadableCard
from gpubroker_server.adapters.ray.options import AgentConfig
from gpubroker_server.adapters.ray.processes import boot_id, process_id
from ray.exceptions import RaySystemError
from structlog.testing import capture_logs

from tests.contracts.runner_stand import GPU, Line, Runner, Stand, a_line
from tests.patience import PATIENCE_SECONDS

OpenLine = Callable[..., Line]


@pytest.fixture
def stand() -> Iterator[Stand]:
    with closing(Stand()) as stand:
        yield stand


@pytest.fixture
def open_line(stand: Stand, tmp_path: Path) -> OpenLine:
    return partial(a_line, stand, tmp_path)


def files_of(config: AgentConfig) -> Path:
    return Path(config.run_dir) / config.node


def leave_a_run(stand: Stand, config: AgentConfig, task: str) -> Runner:
    """As an agent leaves one that is killed: its runner lives, its card is there."""
    name, runner = stand.make(shared=False)
    card = Card(task, 1, 0, ((GPU, 1000),), name, *process_id(runner.process.pid), stand.node)
    RunFiles(files_of(config), boot_id()).write_card(card)
    assert isinstance(runner, Runner)
    return runner


def runs_seen(line: Line) -> list[tuple[str, int]]:
    return list([report[4] for report in line.heard if report[0] == "node_seen"][-1])


async def test_an_agent_answers_nobody_while_one_card_cannot_be_read(
    stand: Stand, open_line: OpenLine
) -> None:
    line = open_line()
    leave_a_run(stand, line.config, "left")
    broken = files_of(line.config) / f"broken-1-0@{boot_id()}.json"
    broken.write_text("")
    for _ in range(2):
        with pytest.raises(UnreadableCard, match=r"broken-1-0.*remove the file"):
            await line.announce()
    broken.unlink()
    assert await line.announce() == "welcome"
    await line.hear("node_seen")
    assert runs_seen(line) == [("left", 1, 0)]


async def test_an_agent_answers_nobody_while_ray_cannot_say_what_is_there(
    stand: Stand, open_line: OpenLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = open_line()
    leave_a_run(stand, line.config, "left")

    def away() -> list[str]:
        raise RaySystemError("the control service is away")

    with monkeypatch.context() as ray:
        ray.setattr(stand, "names", away)
        for _ in range(2):
            with pytest.raises(RaySystemError):
                await line.announce()
    assert await line.announce() == "welcome"
    await line.hear("node_seen")
    assert runs_seen(line) == [("left", 1, 0)]


async def test_an_adopted_run_is_listened_to_and_proven_gone_with_a_measurement(
    stand: Stand, open_line: OpenLine
) -> None:
    line = open_line()
    runner = leave_a_run(stand, line.config, "left")
    await line.announce()
    await line.until(lambda: runner._mailbox)
    runner.say(ended(RunKey("left", 1, 0), failed("exception", "no"), b""))
    gone = await line.hear("gone", "left")
    assert gone[5:] == ("process_absent", ((GPU, 0, 0, {}, 0.0),))
    await line.until(lambda: not list(files_of(line.config).glob("*.json")))
    assert runner.process.poll() is not None


async def test_what_a_power_cut_left_of_a_card_holds_nobody_up(stand: Stand, open_line: OpenLine) -> None:
    line = open_line()
    files_of(line.config).mkdir(parents=True)
    (files_of(line.config) / "old-1-0@another-boot.json").write_text("")
    assert await line.announce() == "welcome"
    assert list(files_of(line.config).iterdir()) == []


async def test_a_run_whose_card_was_removed_is_known_by_what_its_runner_says(
    stand: Stand, open_line: OpenLine
) -> None:
    _, runner = stand.make(shared=False)
    runner.runs = [RunOrder(task="left", fence=1, kind="entrypoint", leases=((GPU, 1000),))]
    line = open_line()
    await line.announce()
    await line.hear("node_seen")
    assert runs_seen(line) == [("left", 1, 0)]
    assert runner.process.poll() is None


async def test_blank_runners_of_an_earlier_agent_are_ended(stand: Stand, open_line: OpenLine) -> None:
    _, runner = stand.make(shared=False)
    line = open_line()
    await line.announce()
    await line.until(lambda: runner.process.poll() is not None)


async def test_an_older_term_that_waited_for_a_newer_ones_adoption_is_stale(
    stand: Stand, open_line: OpenLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = open_line()
    newer.term = 6
    older = Line(newer.agent, newer.config, term=5)
    asked, go_on = threading.Event(), threading.Event()

    def names() -> list[str]:
        asked.set()
        assert go_on.wait(PATIENCE_SECONDS)
        return []

    monkeypatch.setattr(stand, "names", names)
    announcing = asyncio.create_task(newer.announce())
    await newer.until(asked.is_set)
    too_late = asyncio.create_task(older.announce())
    await asyncio.sleep(0)
    go_on.set()
    assert (await announcing, await too_late) == ("welcome", "stale")


async def test_what_one_run_writes_instead_of_a_report_stops_no_other(
    stand: Stand, open_line: OpenLine
) -> None:
    line = open_line(warm_runners=1)
    await line.announce()
    for task in "ab":
        await line.start(task, shareable=True)
    await line.until(lambda: len(stand.started) == 2)
    [runner] = stand.runners
    runner.say(("checkpointed", "a", 1, 0, 1.0, 7, "abc", None, {"no": "address"}))
    runner.say(("nonsense",), ("ended", "b", "one", 0, 1.0))
    runner.say(ended(RunKey("b", 1, 0), failed("exception", "no"), b""))
    await line.hear("gone", "b")
    assert line.told_of("a") == []


async def test_of_checkpoints_that_no_leader_fetched_the_newest_is_kept(open_line: OpenLine) -> None:
    line = open_line()
    await line.announce()
    key = RunKey("t", 1, 0)
    line.agent.say(started(key, 42))
    for number in range(50):
        line.agent.say(checkpointed(key, number, "abc", b"state", None))
    line.agent.say(ended(key, failed("exception", "no"), b""))
    await line.hear("ended")
    assert line.told_of("t") == ["started", "checkpointed", "ended"]
    assert (await line.hear("checkpointed"))[5] == 49


async def test_starts_that_wait_are_served_by_priority_and_then_in_order_of_arrival(
    stand: Stand, open_line: OpenLine
) -> None:
    line = open_line()
    await line.announce()
    for task, priority in ("a", 10), ("b", 90), ("c", 10), ("d", 90):
        await line.start(task, priority=priority)
    await line.until(lambda: len(stand.started) == 4)
    assert stand.started == ["b", "d", "a", "c"]


async def test_a_run_whose_card_cannot_be_written_never_starts_and_its_process_serves_the_next(
    stand: Stand, open_line: OpenLine
) -> None:
    line = open_line()
    await line.announce()
    (files_of(line.config) / "full-1-0.new").mkdir()
    await line.start("full", leases=((GPU, 1000),))
    assert (await line.hear("ended", "full"))[5] == "never_started"
    assert (await line.hear("gone", "full"))[5] == "never_started"
    await line.start("next")
    await line.until(lambda: stand.started == ["next"])


async def test_an_order_that_cannot_be_carried_out_is_told_after_the_others_were(
    stand: Stand, open_line: OpenLine
) -> None:
    line = open_line(warm_runners=1)
    await line.announce()
    with pytest.raises(ValueError, match="1 orders could not be carried out"):
        await line.order("start", line.incarnation, True, {"no": "order"})
    await line.start("next", shareable=True)
    await line.until(lambda: stand.started == ["next"])


async def test_an_agent_that_nobody_asks_leaves_and_leaves_nothing(
    stand: Stand, open_line: OpenLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(node_agent, "DESERTED_SECONDS", 0.0)
    line = open_line(warm_runners=1, idle_stop_seconds=0.0, sample_period_seconds=0.01)
    await line.announce()
    await line.until(lambda: left)
    assert left == [0]
    await line.until(lambda: not stand.names())
    assert os.listdir(tmp_path) == []


async def test_an_agent_that_is_to_be_replaced_takes_no_run_and_loses_none(
    stand: Stand, open_line: OpenLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, has_process = [], asyncio.Event()
    monkeypatch.setattr(os, "_exit", left.append)
    stand.birth = lambda runner: setattr(runner, "answers", has_process)
    line = open_line()
    await line.announce()
    assert (await line.hear("node_seen"))[2]["max_runs"] == 10
    await line.start("waits")
    wanted = Line(line.agent, replace(line.config, max_runs=7), term=2)
    assert await wanted.announce() == "welcome"
    assert (await wanted.hear("node_seen"))[2]["max_runs"] == 0
    assert (left, stand.started) == ([], [])
    has_process.set()
    await wanted.until(lambda: stand.started == ["waits"])
    await wanted.until(lambda: left)


async def test_makers_of_processes_that_never_answer_make_room_for_others(
    stand: Stand, open_line: OpenLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_pool, "BIRTH_SECONDS", 0.05)
    monkeypatch.setattr(runner_pool, "RETRY_PAUSE_SECONDS", 0.0)

    def mute_at_first(runner: Runner) -> None:
        if len(stand.runners) < runner_pool.MAKING_AT_ONCE:
            runner.answers.clear()

    stand.birth = mute_at_first
    line = open_line()
    await line.announce()
    for task in "abc":
        await line.start(task)
    await line.until(lambda: len(stand.started) == 3)
    assert all(
        runner.process.wait(PATIENCE_SECONDS) for runner in stand.runners if not runner.answers.is_set()
    )


async def test_a_warm_runner_of_an_earlier_agent_is_ended_when_it_has_nothing_to_run(
    stand: Stand, open_line: OpenLine
) -> None:
    _, idle = stand.make(shared=True)
    line = open_line(warm_runners=1)
    await line.announce()
    await line.until(lambda: idle.process.poll() is not None)


async def test_a_warm_runner_of_an_earlier_agent_finishes_its_runs_and_takes_no_new_ones(
    stand: Stand, open_line: OpenLine
) -> None:
    """It was made with that agent's user and paths, which may be others now."""
    _, old = stand.make(shared=True)
    old.runs = [RunOrder(task="left", fence=1, kind="entrypoint")]
    line = open_line(warm_runners=1)
    await line.announce()
    await line.start("new", shareable=True)
    await line.until(lambda: "new" in stand.started)
    assert stand.runner_of("new") is not old

    old.say(ended(RunKey("left", 1, 0), failed("exception", "no"), b""))
    await line.hear("gone", "left")
    await line.until(lambda: old.process.poll() is not None)


async def test_a_rank_has_a_process_to_itself_and_hears_to_begin_behind_its_start(
    stand: Stand, open_line: OpenLine
) -> None:
    line = open_line(warm_runners=1)
    await line.announce()
    await line.start("gang", shareable=True, rank=1, world_size=2, barrier=True)
    await line.order("go", "gang", 1, 1, "10.0.0.7:4711")
    await line.until(lambda: "gang" in stand.started)
    runner = stand.runner_of("gang")
    assert [item[0] for item in runner.items] == ["own", "go"]
    assert runner.items[0][-2:] == (stand.host, line.config.node)
    assert runner.items[1][1:] == (("gang", 1, 1), "10.0.0.7:4711")


async def test_a_rank_at_work_hears_who_is_left_and_an_older_leader_tells_it_nothing(
    stand: Stand, open_line: OpenLine
) -> None:
    newer = open_line()
    newer.term = 2
    await newer.announce()
    await newer.order("world", "gang", 1, 0, (0, 1))  # nobody has heard of it here
    await newer.start("gang", world_size=3, barrier=True)
    await newer.order("go", "gang", 1, 0, "10.0.0.7:4711")
    await newer.until(lambda: "gang" in stand.started)
    older = Line(newer.agent, newer.config, term=1)
    await older.order("world", "gang", 1, 0, (0,))
    await newer.order("world", "gang", 1, 0, (0, 1))
    runner = stand.runner_of("gang")
    await newer.until(lambda: len(runner.items) > 2)
    assert runner.items[2:] == [("world", ("gang", 1, 0), (0, 1))]


async def test_an_older_leader_lets_nobody_begin(stand: Stand, open_line: OpenLine) -> None:
    newer = open_line()
    newer.term = 2
    await newer.announce()
    await newer.start("gang", world_size=2, barrier=True)
    await newer.until(lambda: "gang" in stand.started)
    older = Line(newer.agent, newer.config, term=1)
    await older.order("go", "gang", 1, 0, "10.0.0.7:4711")
    await newer.order("go", "gang", 1, 0, "10.0.0.8:4711")
    await newer.until(lambda: len(stand.runner_of("gang").items) > 1)
    assert stand.runner_of("gang").items[1][2] == "10.0.0.8:4711"


async def test_what_an_older_leader_orders_ends_nothing_and_is_told_to_people(
    stand: Stand, open_line: OpenLine
) -> None:
    newer = open_line()
    newer.term = 2
    await newer.announce()
    await newer.start("run")
    await newer.until(lambda: "run" in stand.started)
    older = Line(newer.agent, newer.config, term=1)
    with capture_logs() as lines:
        await older.stop("run", grace_seconds=60.0)
        await newer.stop("run", grace_seconds=50.0)
    runner = stand.runner_of("run")
    await newer.until(lambda: len(runner.items) > 1)
    assert [item[0] for item in runner.items] == ["own", "stop"]
    [refused] = [line for line in lines if line["event"] == "refused: orders of a term that is over"]
    assert (refused["term"], refused["fault"]) == (1, "it is term 2")


async def test_a_run_that_is_taken_over_says_again_how_far_it_is(stand: Stand, open_line: OpenLine) -> None:
    line = open_line()
    runner = leave_a_run(stand, line.config, "left")
    await line.announce()
    await line.until(lambda: runner.items)
    assert runner.items == [("retell", ("left", 1, 0))]
