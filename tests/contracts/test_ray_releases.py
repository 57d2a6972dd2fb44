"""Service, agent and runs of two releases: what of the older one is there goes on, and nothing is lost."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gpubroker.runtime.messages import SPOKEN, RunKey, RunOrder, ended, failed
from gpubroker.runtime.process import INSTANCE_MARK, NODE_MARK, RUN_MARK
from gpubroker_server.adapters.ray import wire
from gpubroker_server.adapters.ray.agent.run_records import Card, RunFiles
from gpubroker_server.adapters.ray.driver.agents import AGAIN_SECONDS, IDLE_SECONDS, Agents
from gpubroker_server.adapters.ray.processes import boot_id, process_id
from gpubroker_server.adapters.ray.wire import unpack
from gpubroker_server.core.domain.device import Node
from gpubroker_server.core.domain.orders import Ended, Ending, ForgetOrder, Gone, NodeSeen, StartOrder
from gpubroker_server.core.domain.units import Fence, Instant, Mib, NodeName, TaskId

from tests.contracts.runner_stand import GPU, Line, Runner, Stand, a_line

OLD = SPOKEN[0]
OpenLine = Callable[..., Line]


@pytest.fixture
def stand() -> Iterator[Stand]:
    with closing(Stand()) as stand:
        yield stand


@pytest.fixture
def open_line(stand: Stand, tmp_path: Path) -> OpenLine:
    return partial(a_line, stand, tmp_path)


async def test_a_run_that_the_release_before_began_is_taken_over_heard_and_stopped(
    stand: Stand, open_line: OpenLine
) -> None:
    line = open_line()
    name, runner = stand.make(shared=False)
    runner.speaks = (OLD,)
    card = Card("left", 1, 0, ((GPU, 1000),), name, *process_id(runner.process.pid), stand.node)
    RunFiles(Path(line.config.run_dir) / line.config.node, boot_id()).write_card(card)
    await line.announce()
    await line.until(lambda: runner.items == [("retell", ("left", 1, 0))])
    await line.stop("left", grace_seconds=60.0)
    await line.until(lambda: runner.items[1:] == [("stop", ("left", 1, 0))])
    runner.say(ended(RunKey("left", 1, 0), failed("exception", "no"), b""))
    assert (await line.hear("ended", "left"))[5] == "failed"
    assert (await line.hear("gone", "left"))[5] == "process_absent"


async def test_a_warm_process_of_the_release_before_finishes_its_runs(
    stand: Stand, open_line: OpenLine
) -> None:
    _, old = stand.make(shared=True)
    old.speaks = (OLD,)
    old.runs = [RunOrder(task="left", fence=1, kind="entrypoint")]
    line = open_line()
    await line.announce()
    await line.until(lambda: old._mailbox)
    old.say(ended(RunKey("left", 1, 0), failed("exception", "no"), b""))
    await line.hear("gone", "left")


async def test_a_process_made_of_older_software_gets_its_orders_in_the_older_form(
    stand: Stand, open_line: OpenLine
) -> None:
    def older(runner: Runner) -> None:
        runner.speaks = (OLD,)

    stand.birth = older
    line = open_line()
    await line.announce()
    await line.start("t")
    await line.until(lambda: "t" in stand.started)
    assert len(stand.runner_of("t").items[0]) == 6


async def test_a_leader_of_the_release_before_is_answered_in_its_form(
    stand: Stand, open_line: OpenLine
) -> None:
    line = open_line()
    line.protocol = wire.SPOKEN[0]
    assert await line.announce() == "welcome"
    _, packed = await line.agent.poll(line.incarnation, 0, 10.0)
    protocol, *_, reports = unpack(packed)
    assert protocol == wire.SPOKEN[0]
    [node] = [report[2] for report in reports if report[0] == "node_seen"]
    assert "release" not in node
    await line.start("t")
    await line.until(lambda: stand.started == ["t"])


async def test_a_leader_of_which_no_form_is_known_is_told_so_and_changes_nothing(
    stand: Stand, open_line: OpenLine
) -> None:
    line = open_line()
    await line.announce()
    stranger = Line(line.agent, line.config, term=2)
    stranger.protocol = 999
    assert await stranger.announce() == "outdated"
    await line.start("t")
    await line.until(lambda: stand.started == ["t"])


async def test_an_agent_with_another_configuration_ends_once_it_has_told_what_nobody_else_knows(
    stand: Stand, open_line: OpenLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor would find neither process nor card of a run that has ended."""
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    before = open_line(sample_period_seconds=0.01)
    await before.announce()
    await before.start("t")
    await before.until(lambda: "t" in stand.started)
    stand.runner_of("t").say(ended(RunKey("t", 1, 0), failed("exception", "no"), b""))
    await before.hear("gone", "t")

    after = Line(before.agent, replace(before.config, max_runs=7), term=2)
    assert await after.announce() == "welcome"
    assert (await after.hear("ended", "t"))[5] == "failed"
    assert left == []
    await after.order("forget", "t", 1, 0)
    await after.until(lambda: left)


async def test_an_agent_with_another_configuration_and_nothing_to_tell_ends_at_once(
    open_line: OpenLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(_code: int) -> None:
        raise SystemExit

    monkeypatch.setattr(os, "_exit", end)
    line = open_line()
    line.config = replace(line.config, max_runs=7)
    with pytest.raises(SystemExit):
        await line.announce()


@pytest.fixture
def left_behind(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """Processes as runs start them, of which no card is there."""
    processes: list[subprocess.Popen[bytes]] = []

    def leave(node: str = "n1", run: str = "lost:3", **given: Any) -> "subprocess.Popen[bytes]":
        marks = {INSTANCE_MARK: "test", NODE_MARK: node, RUN_MARK: run}
        processes.append(subprocess.Popen(["sleep", "600"], env={**os.environ, **marks}, **given))
        return processes[-1]

    yield leave
    for process in processes:
        process.kill()
        process.wait()


async def test_marked_processes_of_a_run_of_which_nobody_knows_are_ended_and_then_proven_gone(
    open_line: OpenLine, left_behind: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    stray, other = left_behind(), left_behind(node="n2", run="other:1")
    line = open_line()
    await line.announce()
    seen = await line.hear("node_seen")
    assert seen[4] == (("lost", 3, 0),)
    gone = await line.hear("gone", "lost")
    assert (gone[5], gone[6]) == ("process_absent", ((GPU, 0, 0, {}, 0.0),))
    assert stray.poll() is not None
    assert other.poll() is None


async def test_a_process_that_prints_to_the_log_of_an_unknown_run_is_of_that_run(
    open_line: OpenLine, left_behind: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    """As the one that a run begins in, whose environment was written before it had marks."""
    line = open_line()
    logs = Path(line.config.run_dir) / line.config.node
    RunFiles(logs, boot_id())
    with (logs / "a-task-3-1.log").open("wb") as log:
        stray = left_behind(run="", stdout=log)
    await line.announce()
    await line.hear("gone", "a-task")
    assert stray.poll() is not None
    assert (await line.hear("node_seen"))[4] == (("a-task", 3, 1),)


NODE, RUN = NodeName("n1"), (TaskId("t"), Fence(1), 0)
FORGET = ForgetOrder(*RUN[:2], NODE, "a.1")


def seen(release: str = "0.0.1", *runs: Any) -> NodeSeen:
    return NodeSeen(Node(NODE, 1.0, Mib(1), 1, "a.1", "b"), (), runs, Instant(0.0), release)


class Time:
    now = 1000.0


def test_an_agent_of_an_earlier_release_is_replaced_once_nothing_is_left_on_its_node() -> None:
    agents = Agents(lambda: Time.now)
    agents.see(seen("0.0.1", RUN), wire.PROTOCOL)
    agents.order(StartOrder(TaskId("u"), Fence(1), NODE, "a.1", (), shareable=False))
    for report in (
        Ended(TaskId("u"), Fence(1), Instant(0.0), Ending.NEVER_STARTED),
        Gone(*RUN[:2], Instant(0.0), "process_absent"),
    ):
        assert to_replace(agents) == []
        agents.hear(NODE, report)
    assert to_replace(agents) == []
    agents.order(FORGET)
    assert to_replace(agents) == [NODE]


def test_where_the_next_agent_is_as_old_the_machine_is_to_be_upgraded_first() -> None:
    agents = Agents(lambda: Time.now)
    agents.see(seen(), wire.PROTOCOL)
    assert "goes on" in agents.views()["n1"]["message"]
    assert to_replace(agents) == [NODE]
    agents.see(seen(), wire.PROTOCOL)
    assert to_replace(agents) == []
    assert "upgrade it there" in agents.views()["n1"]["message"]
    Time.now += AGAIN_SECONDS
    assert to_replace(agents) == [NODE]


@pytest.mark.parametrize(
    ("release", "protocol", "outdated"),
    [
        ("99.0.0", wire.PROTOCOL, False),
        ("99.0.0", wire.SPOKEN[0], True),
        ("", wire.PROTOCOL, True),
    ],
)
def test_what_is_outdated_is_said_with_what_becomes_of_it(
    release: str, protocol: int, outdated: bool
) -> None:
    agents = Agents(lambda: Time.now)
    agents.see(seen(release), protocol)
    view = agents.views()["n1"]
    assert (view["release"], view["protocol"]) == (release or None, protocol)
    assert (view["outdated"], view["message"] is not None) == (outdated, outdated)
    assert json.loads(json.dumps(agents.views())) == agents.views()


def to_replace(agents: Agents) -> list[NodeName]:
    """After a while in which nothing came."""
    assert list(agents.to_replace()) == []
    Time.now += IDLE_SECONDS
    return list(agents.to_replace())
