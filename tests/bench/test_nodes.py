"""`python -m bench nodes`, with the real service and the real driver process."""

from bench.nodes import at_rest


def test_a_thousand_nodes_are_answering_nodes() -> None:
    """Raises NotReady: what a leader does for a message must not grow with the number of nodes."""
    used = at_rest(nodes=1000, gpus=1, seconds=0.5)
    assert used.leader_cores > 0.0
    assert used.driver_cores > 0.0
