"""What the leader does about nodes of which it hears nothing."""

from pathlib import Path

import pytest
from gpubroker_server.adapters.blobs.directory import DirectoryBlobs
from gpubroker_server.broker.observe import Observer
from gpubroker_server.core.domain.decisions import Request
from gpubroker_server.core.domain.orders import Ended, Gone, Heartbeat, NodeLost, NodeReport, Report
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Instant, MonotonicSeconds, NodeName, TaskId
from gpubroker_server.core.lifecycle.quarantine import PROBE_SECONDS
from gpubroker_server.core.lifecycle.reconcile import InventoryRules, NodeRules
from gpubroker_server.core.world.world import World
from structlog.testing import capture_logs

from tests.broker.stage import a_stage
from tests.builders import GIB, NOW, a_node, a_task, a_world, commit, holding


class Watcher:
    """An observer of five nodes with a run each, and the clock by which it listens."""

    def __init__(self, folder: Path) -> None:
        names = [f"n{i}" for i in range(5)]
        runs = [holding(a_task(f"on-{name}"), node=name) for name in names]
        self.world: World = a_world(*map(a_node, names), *runs)
        self.seconds = 50.0
        rules = InventoryRules("test", nodes={"n4": NodeRules(), "n44": NodeRules()})
        blobs = DirectoryBlobs(folder)
        self.observer = Observer(
            self.world, Policy(), blobs, rules, 1024, {}, lambda: MonotonicSeconds(self.seconds)
        )

    def pass_time(self, seconds: float, *beating: str) -> None:
        for _ in range(int(seconds / 0.5)):
            self.seconds += 0.5
            self.observer.hear([Heartbeat(NodeName(name), NOW) for name in beating])
            commit(self.world, self.observer.on_time(NOW))

    @property
    def open_nodes(self) -> set[str]:
        return {name for name, node in self.world.nodes.items() if node.ready}


@pytest.fixture
def watcher(tmp_path: Path) -> Watcher:
    watcher = Watcher(tmp_path)
    watcher.pass_time(10.0, "n0", "n1", "n2", "n3", "n4")
    return watcher


def test_a_silent_node_is_given_up_and_asked_what_became_of_it(watcher: Watcher) -> None:
    watcher.pass_time(8.0, "n0", "n1", "n2", "n3")
    assert watcher.open_nodes == {"n0", "n1", "n2", "n3"}
    assert watcher.observer.to_ask == ["n4"]
    assert watcher.world.runs[NodeName("n4")] == set()


def test_an_operators_resume_reaches_the_leader_and_is_audited(watcher: Watcher) -> None:
    watcher.pass_time(20.0, "n0", "n1", "n2")
    assert watcher.observer.heartbeats.paused is not None
    assert len(watcher.open_nodes) == 5
    said = {"nodes": ["n3", "n4"], "by": "olga", "reason": "no power"}
    watcher.world.add_request(Request("ask_1", TaskId("detection"), "ops", "resume", said, NOW))
    [decision] = watcher.observer.on_requests(NOW)
    assert [note.actor for note in decision.audit] == ["olga"]
    watcher.pass_time(0.5, "n0", "n1", "n2")
    assert watcher.open_nodes == {"n0", "n1", "n2"}
    assert watcher.observer.heartbeats.paused is None


def test_a_node_of_the_settings_that_never_joins_is_named_once(watcher: Watcher) -> None:
    with capture_logs() as lines:
        for later in range(0, 80, 4):
            commit(watcher.world, watcher.observer.on_time(Instant(NOW + later)))
    told = [(line["node"], line["fault"]) for line in lines if "never joined" in line["event"]]
    assert told == [("n44", "known nodes: n0, n1, n2, n3, n4")]


async def test_a_loss_of_many_nodes_at_once_is_not_believed(watcher: Watcher) -> None:
    told = [NodeLost(NodeName(name), f"{name}-1", NOW, "no agent") for name in ("n1", "n2", "n3")]
    assert await watcher.observer.on_reports(told, NOW) == []
    assert watcher.observer.heartbeats.paused is not None
    assert await watcher.observer.on_reports([], NOW) == []
    assert watcher.observer.heartbeats.paused is not None


async def test_given_up_agent_is_asked_and_its_answer_opens_its_node_again(
    tmp_path: Path,
) -> None:
    async with a_stage(tmp_path) as stage:
        row = stage.world.nodes[NodeName("n1")]
        lost = NodeLost(row.name, row.incarnation, Instant(stage.clock.time), "a test says so")
        await stage.hear(lost)
        assert not stage.world.nodes[NodeName("n1")].ready
        answer = await stage.executor.reports()
        assert any(isinstance(report, NodeReport) for report in answer)
        with capture_logs() as lines:
            await stage.hear(*answer)
            await stage.hear(*answer)
        assert stage.world.nodes[NodeName("n1")].ready
        told = [line for line in lines if line["event"] == "a node answers"]
        assert [line["node"] for line in told] == ["n1"], "once"


async def test_a_lost_report_is_asked_for_again_and_ends_the_quarantine(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        await stage.submit("one", gpu_mb=GIB)
        await stage.leader.cycle()
        told: list[Report] = []
        while not any(isinstance(report, Gone) for report in told):
            told += await stage.executor.reports()
        assert any(isinstance(report, Ended) for report in told)
        await stage.hear(*(report for report in told if not isinstance(report, Gone)))
        quarantined = stage.world.unconfirmed.quarantined
        while not quarantined:
            await stage.later(1.0)
        since = stage.clock.time
        assert list(quarantined) == ["one"]
        while quarantined:
            assert stage.clock.time < since + 2 * PROBE_SECONDS
            await stage.later(1.0)
        assert stage.clock.time >= since + PROBE_SECONDS
        assert stage.world.nodes[NodeName("n1")].ready
