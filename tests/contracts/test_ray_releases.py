"""Service, agent and runs of two releases: runs and agents of the older one go on, and nothing is lost.

The newer one is this software, told that it also speaks a form after this one.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpubroker.runtime import messages
from gpubroker.runtime.command_reports import CommandReports
from gpubroker.runtime.journal import Journal
from gpubroker.runtime.messages import PROTOCOL, RunKey, RunOrder, RunOutcome, ended, failed
from gpubroker.runtime.process import INSTANCE_MARK, NODE_MARK, RUN_MARK
from gpubroker.runtime.task import RunningTask
from gpubroker_server.adapters.ray import wire
from gpubroker_server.adapters.ray.agent import node_agent
from gpubroker_server.adapters.ray.agent.run_files import RunFiles, RunRecord
from gpubroker_server.adapters.ray.driver.agents import AGAIN_SECONDS, IDLE_SECONDS, NodeAgents
from gpubroker_server.adapters.ray.processes import boot_id, process_id
from gpubroker_server.adapters.ray.wire import unpack
from gpubroker_server.core.domain.device import Node
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import Ended, Ending, ForgetOrder, Gone, NodeReport, StartOrder
from gpubroker_server.core.domain.units import Fence, Instant, Mib, MonotonicSeconds, NodeName, TaskId
from msgspec.structs import replace

from tests.contracts.fake_runners import GPU, FakeRunners, Leader

NEWER = PROTOCOL + 1
OpenLeader = Callable[..., Leader]


@pytest.fixture
def newer_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents of this test also speak the form after this one, with their leaders and with runners."""
    monkeypatch.setattr(messages, "SPOKEN", (PROTOCOL, NEWER))
    monkeypatch.setattr(node_agent, "SPOKEN", (wire.PROTOCOL, wire.PROTOCOL + 1))


@pytest.mark.usefixtures("newer_agent")
async def test_a_run_of_the_release_before_is_taken_over_listened_to_and_stopped(
    runners: FakeRunners, open_leader: OpenLeader
) -> None:
    leader = open_leader()
    name, runner = runners.make(shared=False)
    card = RunRecord(
        "left", 1, 0, ((GPU, 1000),), name, *process_id(runner.process.pid), runners.node, PROTOCOL
    )
    RunFiles(Path(leader.config.run_dir) / leader.config.node, boot_id()).write_record(card)
    await leader.announce()
    await leader.until(lambda: runner.items == [("retell", ("left", 1, 0))])
    await leader.stop("left", grace_seconds=60.0)
    await leader.until(lambda: runner.items[1:] == [("stop", ("left", 1, 0))])
    runner.report(ended(RunKey("left", 1, 0), failed("exception", "no"), b""))
    assert (await leader.receive("ended", "left"))[5] == "failed"
    assert (await leader.receive("gone", "left"))[5] == "process_absent"


@pytest.mark.usefixtures("newer_agent")
async def test_a_warm_process_of_the_release_before_finishes_its_runs(
    runners: FakeRunners, open_leader: OpenLeader
) -> None:
    _, old = runners.make(shared=True)
    old.runs = [RunOrder(task="left", fence=1, kind="entrypoint")]
    leader = open_leader()
    await leader.announce()
    await leader.until(lambda: old._mailbox)
    old.report(ended(RunKey("left", 1, 0), failed("exception", "no"), b""))
    await leader.receive("gone", "left")
    await leader.until_noted(old)


@pytest.mark.parametrize("protocol", messages.SPOKEN)
@pytest.mark.parametrize("asked_in", wire.SPOKEN)
async def test_agent_reports_an_earlier_processes_command_success_as_unproven(
    runners: FakeRunners, open_leader: OpenLeader, protocol: int, asked_in: int
) -> None:
    """An earlier leader does not learn it: it would not read the report."""
    runners.on_start = lambda runner: setattr(runner, "speaks", (protocol,))
    leader = open_leader()
    leader.protocol = asked_in
    await leader.announce()
    await leader.start("t")
    await leader.until(lambda: "t" in runners.started)
    well = RunOutcome("succeeded", result=messages.ENDED_WELL)
    runners.runner_of("t").report(ended(RunKey("t", 1, 0), well, b""))
    told = await leader.receive("ended", "t")
    unproven = (protocol < messages.KNOWS_NOTICE,)
    assert told[10:] == (unproven if asked_in >= wire.TELLS_UNPROVEN_ENDS else ())


@pytest.mark.parametrize("place", [None, "/tmp"], ids=["its usual place", "/tmp"])
async def test_the_file_for_reports_of_a_killed_command_is_removed(
    runners: FakeRunners, open_leader: OpenLeader, monkeypatch: pytest.MonkeyPatch, place: str | None
) -> None:
    leader = open_leader()
    await leader.announce()
    await leader.start("t")
    await leader.until(lambda: "t" in runners.started)
    task = RunningTask(RunOrder("t", 1, "command"), Journal(lambda _delay: None))
    with monkeypatch.context() as run:
        if place is not None:
            run.setattr(tempfile, "tempdir", place)
        instance = leader.config.instance
        left, other = (CommandReports(RunKey("t", fence, 0), task, instance) for fence in (1, 11))
    runners.runner_of("t").process.kill()
    await leader.receive("gone", "t")
    assert are_there(left.path, other.path) == [False, True]
    other.close()


def are_there(*paths: str) -> list[bool]:
    return [Path(path).exists() for path in paths]


@pytest.mark.usefixtures("newer_agent")
@pytest.mark.parametrize("spoken", [(PROTOCOL,), (PROTOCOL, NEWER)])
async def test_process_gets_orders_in_the_newest_form_it_shares_with_the_agent(
    runners: FakeRunners, open_leader: OpenLeader, spoken: tuple[int, ...]
) -> None:
    runners.on_start = lambda runner: setattr(runner, "speaks", spoken)
    leader = open_leader()
    await leader.announce()
    await leader.start("t")
    await leader.until(lambda: "t" in runners.started)
    assert runners.runner_of("t").protocols == {max(spoken)}


@pytest.mark.usefixtures("newer_agent")
@pytest.mark.parametrize("spoken", [wire.PROTOCOL, wire.PROTOCOL + 1])
async def test_a_leader_is_answered_in_its_form(
    runners: FakeRunners, open_leader: OpenLeader, spoken: int
) -> None:
    leader = open_leader()
    leader.protocol = spoken
    assert await leader.announce() == "welcome"
    _, packed = await leader.agent.poll(leader.incarnation, 0, 10.0)
    assert unpack(packed)[0] == spoken
    await leader.start("t")
    await leader.until(lambda: runners.started == ["t"])


async def test_a_leader_that_shares_no_form_is_refused_and_changes_nothing(
    runners: FakeRunners, open_leader: OpenLeader
) -> None:
    leader = open_leader()
    await leader.announce()
    stranger = Leader(leader.agent, leader.config, term=2)
    stranger.protocol = 999
    assert await stranger.announce() == "outdated"
    await leader.start("t")
    await leader.until(lambda: runners.started == ["t"])


async def test_reconfigured_agent_ends_once_it_has_reported_what_only_it_knows(
    runners: FakeRunners, open_leader: OpenLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor would find neither process nor card of a run that has ended."""
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    before = open_leader(sample_period_seconds=0.01)
    await before.announce()
    await before.start("t")
    await before.until(lambda: "t" in runners.started)
    runners.runner_of("t").report(ended(RunKey("t", 1, 0), failed("exception", "no"), b""))
    await before.receive("gone", "t")

    after = Leader(before.agent, replace(before.config, max_runs=7), term=2)
    assert await after.announce() == "welcome"
    assert (await after.receive("ended", "t"))[5] == "failed"
    assert left == []
    await after.order("forget", "t", 1, 0)
    await after.until(lambda: left)


async def test_reconfigured_agent_with_nothing_to_report_ends_at_once(
    open_leader: OpenLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(_code: int) -> None:
        raise SystemExit

    monkeypatch.setattr(os, "_exit", end)
    leader = open_leader()
    leader.config = replace(leader.config, max_runs=7)
    with pytest.raises(SystemExit):
        await leader.announce()


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


async def test_marked_processes_of_an_unknown_run_are_killed_and_proven_gone(
    open_leader: OpenLeader, left_behind: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    stray, other = left_behind(), left_behind(node="n2", run="other:1")
    leader = open_leader()
    await leader.announce()
    seen = await leader.receive("node_seen")
    assert seen[4] == (("lost", 3, 0),)
    gone = await leader.receive("gone", "lost")
    assert (gone[5], gone[6]) == ("process_absent", ((GPU, 0, 0, {}, 0.0),))
    assert stray.poll() is not None
    assert other.poll() is None


async def test_process_with_an_unknown_runs_log_open_belongs_to_that_run(
    open_leader: OpenLeader, left_behind: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    """A run begins in such a process: its environment was written before it had marks."""
    leader = open_leader()
    logs = Path(leader.config.run_dir) / leader.config.node
    RunFiles(logs, boot_id())
    with (logs / "a-task-3-1.log").open("wb") as log:
        stray = left_behind(run="", stdout=log)
    await leader.announce()
    await leader.receive("gone", "a-task")
    assert stray.poll() is not None
    assert (await leader.receive("node_seen"))[4] == (("a-task", 3, 1),)


NODE, RUN = NodeName("n1"), (TaskId("t"), Fence(1), 0)
FORGET = ForgetOrder(*RUN[:2], NODE, "a.1")


def seen(release: str = "0.0.1", *runs: Any) -> NodeReport:
    return NodeReport(Node(NODE, 1.0, Mib(1), 1, "a.1", "b"), (), runs, Instant(0.0), release)


class Time:
    now = 1000.0


def test_an_agent_of_an_earlier_release_is_replaced_when_its_node_is_idle() -> None:
    agents = NodeAgents(lambda: MonotonicSeconds(Time.now))
    agents.see(seen("0.0.1", RUN), wire.PROTOCOL)
    agents.on_order(StartOrder(TaskId("u"), Fence(1), NODE, "a.1", (), shareable=False))
    for report in (
        Ended(TaskId("u"), Fence(1), Instant(0.0), Ending.NEVER_STARTED),
        Gone(*RUN[:2], Instant(0.0), Proof.PROCESS_ABSENT),
    ):
        assert not is_replaced(agents)
        agents.on_report(NODE, report)
    assert not is_replaced(agents)
    agents.on_order(FORGET)
    assert is_replaced(agents)


def test_an_agent_whose_successor_is_as_old_is_not_replaced_again_soon() -> None:
    agents = NodeAgents(lambda: MonotonicSeconds(Time.now))
    agents.see(seen(), wire.PROTOCOL)
    assert "stays in use" in agents.views()["n1"]["message"]
    assert is_replaced(agents)
    agents.see(seen(), wire.PROTOCOL)
    assert not is_replaced(agents)
    assert "upgrade it there" in agents.views()["n1"]["message"]
    Time.now += AGAIN_SECONDS
    assert is_replaced(agents)


@pytest.mark.parametrize(
    ("release", "protocol", "outdated"),
    [
        ("99.0.0", wire.PROTOCOL, False),
        ("99.0.0", wire.PROTOCOL - 1, True),
        ("", wire.PROTOCOL, True),
    ],
)
def test_the_view_of_an_outdated_agent_says_what_happens_to_it(
    release: str, protocol: int, outdated: bool
) -> None:
    agents = NodeAgents(lambda: MonotonicSeconds(Time.now))
    agents.see(seen(release), protocol)
    view = agents.views()["n1"]
    assert (view["release"], view["protocol"]) == (release or None, protocol)
    assert (view["outdated"], view["message"] is not None) == (outdated, outdated)
    assert json.loads(json.dumps(agents.views())) == agents.views()


def is_replaced(agents: NodeAgents) -> bool:
    """After a while in which nothing came."""
    assert not agents.to_replace(NODE)
    Time.now += IDLE_SECONDS
    return agents.to_replace(NODE)
