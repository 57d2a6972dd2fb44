"""Which silent nodes are declared lost, and when none is."""

from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision, Request
from gpubroker_server.core.domain.orders import NodeLost
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Instant, NodeName, TaskId
from gpubroker_server.core.lifecycle.change_requests import carry_out
from gpubroker_server.core.lifecycle.runs import apply_reports
from gpubroker_server.core.lifecycle.silent_nodes import (
    NODE_PATIENCE_SECONDS,
    RECENT_SECONDS,
    HeartbeatMonitor,
    heard_nodes,
    nodes_without_answer,
)
from gpubroker_server.core.world.world import World
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import NOW, a_node, a_task, a_world, commit, holding

BEAT = Policy().beat_seconds
PATIENCE = BEAT * Policy().beats_missed
LOOK = 0.25


def nodes_with_runs(runs: dict[str, int], *, away: tuple[str, ...] = ()) -> World:
    """`away`: nodes that have not answered this term."""
    parts = [holding(a_task(f"{node}-{i}"), node=node) for node, n in runs.items() for i in range(n)]
    return a_world(*(a_node(name, ready=name not in away) for name in runs), *parts)


class Cluster:
    """Nodes that beat, and a leader that looks; time passes in steps of a look."""

    def __init__(self, runs: dict[str, int], **policy: Any) -> None:
        self.world = nodes_with_runs(runs)
        self.monitor = HeartbeatMonitor(Policy(**policy))
        self.at = 1000.0
        self.dead: set[str] = set()
        self.lost: dict[str, float] = {}
        """Node -> when it was given up."""
        self.why: dict[str, str] = {}
        self.listed: set[str] | None = None
        """What the control service has; None while it is away."""
        self.next_beat = dict.fromkeys(runs, self.at)

    def step(self, seconds: float = LOOK, *, looks: bool = True, listening: bool = True) -> None:
        self.at += seconds
        for node, due in self.next_beat.items():
            if due <= self.at:
                self.next_beat[node] = self.at + BEAT
                if looks and listening and node not in self.dead:
                    self.monitor.heard(NodeName(node), self.at)
        if self.listed is not None:
            self.monitor.listed({NodeName(node) for node in self.listed}, self.world, self.at)
        if looks:
            self.take(self.monitor.check(self.world, self.at, Instant(self.at), listening=listening))

    def run(self, seconds: float, **how: Any) -> None:
        for _ in range(round(seconds / LOOK)):
            self.step(**how)

    def take(self, lost: list[NodeLost]) -> None:
        self.lost |= {report.node: self.at for report in lost}
        self.why |= {report.node: report.why for report in lost}
        commit(self.world, apply_reports(self.world, lost, Instant(self.at), Policy()))

    def told(self, *nodes: str, confirmed: bool = True) -> list[str]:
        """The cluster, or else a link to an agent, says that these are dead: those that are given up at
        once."""
        rows = [self.world.nodes[NodeName(node)] for node in nodes]
        told = [NodeLost(row.name, row.incarnation, NOW, "Ray says so", confirmed) for row in rows]
        given_up = self.monitor.report_dead(told, self.world, self.at, Instant(self.at))
        self.take(given_up)
        return [report.node for report in given_up]

    @property
    def paused(self) -> tuple[str, ...]:
        return () if self.monitor.paused is None else self.monitor.paused.nodes


def ten(**policy: Any) -> Cluster:
    """Nodes n0 to n9 with a run each, heard of for a while."""
    cluster = Cluster({f"n{i}": 1 for i in range(10)}, **policy)
    cluster.run(20.0)
    assert cluster.lost == {}
    return cluster


def test_silent_node_is_given_up_with_its_runs_within_eight_seconds() -> None:
    cluster = ten()
    cluster.dead = {"n3"}
    died_at = cluster.at
    cluster.run(8.0)
    assert list(cluster.lost) == ["n3"]
    assert PATIENCE - BEAT < cluster.lost["n3"] - died_at <= 8.0
    assert "its agent was silent for 6." in cluster.why["n3"]
    assert cluster.world.tasks[TaskId("n3-0")].state is TaskState.PENDING
    assert not cluster.world.nodes[NodeName("n3")].ready


def test_a_node_that_misses_two_beats_is_not_given_up() -> None:
    cluster = ten()
    cluster.dead = {"n3"}
    cluster.run(PATIENCE - BEAT)
    cluster.dead = set()
    cluster.run(30.0)
    assert cluster.lost == {}


def test_a_lost_node_is_not_declared_lost_again() -> None:
    cluster = ten()
    cluster.dead = {"n3"}
    cluster.run(8.0)
    first = dict(cluster.lost)
    cluster.run(60.0)
    assert cluster.lost == first


@pytest.mark.parametrize("gap", [BEAT + 0.1, 10.0, 3600.0], ids=["late", "stopped", "asleep"])
def test_late_leader_declares_no_node_lost_before_its_whole_patience(
    gap: float,
) -> None:
    cluster = ten()
    cluster.dead = {"n3"}
    cluster.step(gap, looks=False)
    cluster.step(0.0)
    cluster.run(PATIENCE - 2 * LOOK)
    assert cluster.lost == {}
    cluster.run(BEAT)
    assert list(cluster.lost) == ["n3"]


def test_a_leader_that_has_just_taken_over_listens_first() -> None:
    cluster = Cluster({"n1": 1, "n2": 1})
    cluster.dead = {"n2"}
    cluster.run(PATIENCE - LOOK)
    assert cluster.lost == {}
    cluster.run(2 * LOOK)
    assert list(cluster.lost) == ["n2"]


def test_a_leader_that_cannot_listen_declares_no_node_lost() -> None:
    cluster = ten()
    cluster.dead = {"n3"}
    cluster.run(60.0, listening=False)
    cluster.run(PATIENCE - LOOK)
    assert cluster.lost == {}


def test_while_no_node_is_heard_none_is_declared_lost() -> None:
    cluster = Cluster({"n1": 3})
    cluster.run(10.0)
    cluster.dead = {"n1"}
    cluster.run(60.0)
    assert (cluster.lost, cluster.paused) == ({}, ("n1",))
    assert cluster.monitor.paused is not None
    assert "the leader may be cut off" in cluster.monitor.paused.message
    cluster.dead = set()
    cluster.run(BEAT + LOOK)
    assert cluster.paused == ()


# Too many at once


def test_nodes_with_over_a_fifth_of_the_runs_silent_at_once_are_kept() -> None:
    cluster = ten()
    cluster.dead = {"n1", "n2", "n3"}
    cluster.run(60.0)
    assert (cluster.lost, cluster.paused) == ({}, ("n1", "n2", "n3"))
    paused = cluster.monitor.paused
    assert paused is not None
    assert (paused.runs, paused.of_runs) == (3, 10)
    assert "3 nodes with 3 of 10 runs fell silent at once, which is more than 20%" in paused.message


def test_nodes_with_a_fifth_of_the_runs_are_given_up() -> None:
    cluster = ten()
    cluster.dead = {"n1", "n2"}
    cluster.run(8.0)
    assert set(cluster.lost) == {"n1", "n2"}


def test_the_loss_of_one_node_is_believed_however_much_runs_there() -> None:
    cluster = Cluster({"n1": 50, "n2": 1})
    cluster.run(10.0)
    cluster.dead = {"n1"}
    cluster.run(8.0)
    assert list(cluster.lost) == ["n1"]


def test_nodes_silent_soon_after_one_that_was_given_up_are_counted_with_it() -> None:
    cluster = ten()
    cluster.dead = {"n1", "n2"}
    cluster.run(8.0)
    cluster.dead |= {"n3"}
    cluster.run(8.0)
    assert (set(cluster.lost), cluster.paused) == ({"n1", "n2"}, ("n3",))
    cluster.run(RECENT_SECONDS)
    assert set(cluster.lost) == {"n1", "n2", "n3"}, "by then it went alone"


def test_detection_resumes_when_the_nodes_are_heard_again() -> None:
    cluster = ten()
    cluster.dead = {"n1", "n2", "n3"}
    cluster.run(20.0)
    cluster.dead = set()
    cluster.run(BEAT + LOOK)
    assert (cluster.lost, cluster.paused) == ({}, ())
    cluster.dead = {"n7"}
    cluster.run(8.0)
    assert list(cluster.lost) == ["n7"]


def test_an_operator_can_resume_detection_for_named_nodes() -> None:
    cluster = ten()
    cluster.dead = {"n1", "n2", "n3", "n4"}
    cluster.run(20.0)
    cluster.monitor.resume([NodeName("n1"), NodeName("n2")])
    cluster.step()
    assert (set(cluster.lost), cluster.paused) == ({"n1", "n2"}, ("n3", "n4"))


def test_a_node_heard_before_the_resume_is_carried_out_is_kept() -> None:
    cluster = ten()
    cluster.dead = {"n1", "n2", "n3"}
    cluster.run(20.0)
    cluster.monitor.resume([NodeName("n1")])
    cluster.monitor.heard(NodeName("n1"), cluster.at)
    cluster.step()
    assert "n1" not in cluster.lost


def test_a_resume_is_audited_with_name_and_reason() -> None:
    said = {"nodes": ["n1", "n2"], "by": "olga", "reason": "rack 4 burns"}
    request = Request("ask_1", TaskId("detection"), "ops", "resume", said, NOW)
    decision = carry_out(a_world(), request, NOW, Policy())
    [note] = decision.audit
    assert (note.actor, note.action, note.subject, note.reason) == (
        "olga", "detection.resume", "n1, n2", "rack 4 burns",
    )  # fmt: skip
    assert decision.requests_done == ("ask_1",)


# What the cluster says


def test_a_node_that_the_cluster_says_is_dead_is_given_up_at_once() -> None:
    cluster = ten()
    assert cluster.told("n1") == ["n1"]
    assert cluster.why["n1"] == "Ray says so"


def test_the_cluster_is_believed_however_many_nodes_it_says_are_dead() -> None:
    cluster = ten()
    assert cluster.told("n1", "n2", "n3") == ["n1", "n2", "n3"]
    assert cluster.paused == ()
    cluster.dead = {"n1", "n2", "n3", "n4"}
    cluster.run(8.0)
    assert "n4" in cluster.lost, "those do not count against one that falls silent with them"


def test_held_back_nodes_are_given_up_when_the_cluster_says_they_are_dead() -> None:
    cluster = ten()
    cluster.dead = {"n1", "n2", "n3"}
    cluster.run(20.0)
    assert (cluster.lost, cluster.paused) == ({}, ("n1", "n2", "n3"))
    assert cluster.monitor.paused is not None
    assert cluster.monitor.paused.summary == "paused: n1, n2, n3 silent"
    assert cluster.told("n1", "n2") == ["n1", "n2"]
    cluster.step()
    assert set(cluster.lost) == {"n1", "n2", "n3"}, "the last one is believed like any single node"
    assert cluster.paused == ()


def test_the_pause_also_applies_to_nodes_of_which_only_the_agent_is_away() -> None:
    cluster = ten()
    assert cluster.told("n1", "n2", "n3", confirmed=False) == []
    assert cluster.paused == ("n1", "n2", "n3")
    cluster.told()
    assert cluster.paused == ("n1", "n2", "n3")
    cluster.run(BEAT + LOOK)
    assert (cluster.lost, cluster.paused) == ({}, ()), "they are there"


def test_a_report_about_a_replaced_agent_is_ignored() -> None:
    cluster = ten()
    old = NodeLost(NodeName("n1"), "n1-0", NOW, "Ray says so")
    stranger = NodeLost(NodeName("n99"), "n99-0", NOW, "Ray says so")
    assert cluster.monitor.report_dead([old, stranger], cluster.world, cluster.at, NOW) == []


def test_a_report_before_the_first_check_counts() -> None:
    cluster = Cluster({"n1": 1, "n2": 1})
    assert cluster.told("n1", confirmed=False) == ["n1"]


def test_the_last_node_is_given_up_when_the_cluster_is_certain() -> None:
    cluster = Cluster({"n1": 1})
    cluster.run(5.0)
    assert cluster.told("n1", confirmed=False) == ["n1"]


def test_a_node_reported_dead_that_has_answered_since_is_kept() -> None:
    cluster = ten()
    assert cluster.told("n1", "n2", "n3", confirmed=False) == []
    row = cluster.world.nodes[NodeName("n1")]
    again = a_node("n1", incarnation="n1-2", version=row.version + 1)
    commit(cluster.world, Decision("n1", "node_seen", nodes=(again,)))
    cluster.dead = {"n1", "n2", "n3"}
    cluster.step()
    assert "n1" not in cluster.paused


# A new term


def test_a_node_whose_agent_does_not_answer_a_new_term_is_declared_lost() -> None:
    world = nodes_with_runs({"n1": 1, "n2": 1, "n3": 0}, away=("n2", "n3"))
    assert nodes_without_answer(world, NOW, Instant(NOW + NODE_PATIENCE_SECONDS - 0.1)) == []
    [lost] = nodes_without_answer(world, NOW, Instant(NOW + NODE_PATIENCE_SECONDS))
    assert (lost.node, lost.why) == ("n2", "its agent has not answered")


def test_a_leader_without_any_answer_declares_no_node_lost() -> None:
    world = nodes_with_runs({"n1": 1, "n2": 1}, away=("n1", "n2"))
    assert nodes_without_answer(world, NOW, Instant(NOW + 3600.0)) == []


# Whatever the clocks do


@given(
    gaps=st.lists(st.tuples(st.floats(0.01, 30.0), st.booleans()), min_size=1, max_size=60),
    lag=st.floats(0.0, BEAT),
)
def test_node_with_heartbeats_is_never_lost_however_late_the_leader_is(
    gaps: list[tuple[float, bool]], lag: float
) -> None:
    """Beats arrive while the leader is away too, late by `lag`; it hears of them when it looks again, or only
    with the next one."""
    cluster = Cluster({"n1": 1, "n2": 1, "n3": 1})
    for gap, listening in gaps:
        cluster.step(gap, listening=listening)
        cluster.at += lag / len(gaps)
        cluster.run(LOOK)
    assert cluster.lost == {}


@given(
    runs=st.lists(st.integers(0, 5), min_size=2, max_size=12),
    deaths=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 40)), max_size=12),
    late=st.lists(st.tuples(st.integers(0, 160), st.floats(0.5, 20.0)), max_size=4),
)
def test_only_silent_nodes_are_given_up_and_at_most_a_share_at_once(
    runs: list[int], deaths: list[tuple[int, int]], late: list[tuple[int, float]]
) -> None:
    cluster = Cluster({f"n{i:02}": n for i, n in enumerate(runs)})
    total = sum(runs)
    dying = {step: f"n{i:02}" for i, step in deaths if i < len(runs)}
    sleeps = dict(late)
    died_at: dict[str, float] = {}
    of_node = {f"n{i:02}": n for i, n in enumerate(runs)}
    for step in range(200):
        if (node := dying.get(step)) is not None and node not in died_at:
            cluster.dead.add(node)
            died_at[node] = cluster.at
        if (gap := sleeps.get(step)) is not None:
            cluster.step(gap, looks=False)
        before = set(cluster.lost)
        cluster.step()
        for node in set(cluster.lost) - before:
            assert node in died_at, "it beats"
            assert cluster.at - died_at[node] > PATIENCE - BEAT - LOOK
        recent = [n for n, at in cluster.lost.items() if cluster.at - at <= RECENT_SECONDS]
        if len(recent) >= 2:
            assert sum(of_node[n] for n in recent) <= Policy().pause_share * total


def test_a_node_that_has_missed_two_beats_is_late_until_it_is_heard_of() -> None:
    cluster = Cluster({"n1": 1, "n2": 1, "n3": 0})
    cluster.run(10.0)
    assert cluster.monitor.late(cluster.world, cluster.at, NOW) == {}
    cluster.dead.add("n1")
    last = cluster.at - dict(cluster.monitor._silences(cluster.world, cluster.at))[NodeName("n1")]
    cluster.run(BEAT + 1.0)
    [(node, since)] = cluster.monitor.late(cluster.world, cluster.at, Instant(cluster.at)).items()
    assert (node, since) == ("n1", last)
    cluster.dead.clear()
    cluster.run(BEAT)
    assert cluster.monitor.late(cluster.world, cluster.at, NOW) == {}


def test_only_expected_nodes_count_as_heard_or_not() -> None:
    drained = a_node("gone", ready=False, draining_since=NOW)
    world = a_world(a_node("n1"), a_node("n2"), a_node("n3", ready=False), drained)
    assert heard_nodes(world, {NodeName("n2")}) == {"n1": True, "n2": False, "n3": False}
