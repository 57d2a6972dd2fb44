"""A control service that was lost and came back without its nodes: when those are given up."""

from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.lifecycle.silent_nodes import LISTING_SECONDS, UNLISTED_SECONDS

from tests.builders import a_node, commit
from tests.core.lifecycle.test_silent_nodes import BEAT, PATIENCE, Cluster


def message_of(cluster: Cluster) -> str:
    return "" if cluster.monitor.paused is None else cluster.monitor.paused.message


def join(cluster: Cluster, node: str) -> None:
    commit(cluster.world, [Decision(node, "node_seen", nodes=(a_node(node),))])
    cluster.next_beat[node] = cluster.at


def after_the_loss_of_its_head(**runs: int) -> Cluster:
    """The control service is back and has no node yet; nothing has been given up."""
    cluster = Cluster(runs)
    cluster.listed = set(runs)
    cluster.run(BEAT)
    cluster.listed, cluster.dead = None, set(runs)
    cluster.run(PATIENCE + 1.0)
    assert (cluster.lost, cluster.paused) == ({}, tuple(runs))
    assert "control service" not in message_of(cluster)
    cluster.listed = set()
    cluster.run(1.0)
    return cluster


def comes_back(cluster: Cluster, node: str) -> None:
    assert cluster.listed is not None
    cluster.listed.add(node)
    cluster.dead.discard(node)


def test_nodes_missing_from_a_restarted_control_service_are_given_up() -> None:
    """They are given up some time after another node has joined it again."""
    cluster = after_the_loss_of_its_head(n1=1, n2=2, n3=2)
    comes_back(cluster, "n1")
    cluster.run(UNLISTED_SECONDS - 2.0)
    assert (cluster.lost, cluster.paused) == ({}, ("n2", "n3"))
    assert "answers and does not have them: 70 s after it came back they are given up" in message_of(cluster)
    cluster.run(2.0)
    assert (set(cluster.lost), cluster.paused) == ({"n2", "n3"}, ())


def test_a_node_that_joins_it_again_in_time_keeps_its_runs() -> None:
    cluster = after_the_loss_of_its_head(n1=1, n2=2, n3=2, n4=2)
    comes_back(cluster, "n1")
    cluster.run(UNLISTED_SECONDS / 2)
    comes_back(cluster, "n2")
    cluster.run(UNLISTED_SECONDS)
    assert set(cluster.lost) == {"n3", "n4"}


def test_nodes_of_other_names_make_it_certain_too() -> None:
    """Machines may have new names when they come back; runs of those that never do are needed elsewhere."""
    cluster = after_the_loss_of_its_head(n1=1, n2=2, n3=2)
    join(cluster, "another")
    comes_back(cluster, "another")
    cluster.run(UNLISTED_SECONDS - 2.0)
    assert (cluster.lost, cluster.paused) == ({}, ("n1", "n2", "n3"))
    assert "they are given up, if any node is there then" in message_of(cluster)
    cluster.run(2.0)
    assert (set(cluster.lost), cluster.paused) == ({"n1", "n2", "n3"}, ())


def test_while_no_node_is_there_none_is_given_up() -> None:
    cluster = after_the_loss_of_its_head(n1=1, n2=2, n3=2)
    cluster.run(2 * UNLISTED_SECONDS)
    assert (cluster.lost, cluster.paused) == ({}, ("n1", "n2", "n3"))
    comes_back(cluster, "n1")
    cluster.run(PATIENCE)
    assert set(cluster.lost) == {"n2", "n3"}


def test_wait_for_nodes_restarts_when_the_control_service_is_away_again() -> None:
    cluster = after_the_loss_of_its_head(n1=1, n2=2, n3=2)
    comes_back(cluster, "n1")
    cluster.run(UNLISTED_SECONDS - 2.0)
    cluster.listed = None
    cluster.run(LISTING_SECONDS + 1.0)
    assert "control service" not in message_of(cluster)
    cluster.listed = {"n1"}
    cluster.run(UNLISTED_SECONDS - 2.0)
    assert (cluster.lost, cluster.paused) == ({}, ("n2", "n3"))
    cluster.run(4.0)
    assert set(cluster.lost) == {"n2", "n3"}
