"""The worst moment for a leader to be stopped: between the commit of a start and its order, on real Ray."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.chaos.late_orders import TwoBrokers
from tests.e2e.ray_lab import Lab, guest_environment

TAKEOVER_SECONDS = 5.0


@pytest.fixture
def brokers(tmp_path: Path, postgres_url: str, shared_lab: Lab) -> Iterator[TwoBrokers]:
    env = guest_environment(shared_lab.options.data_dir)
    with ExitStack() as stack:
        yield TwoBrokers(tmp_path, postgres_url, shared_lab.head, env, stack)


def test_a_leader_that_wakes_after_its_term_can_neither_start_nor_commit(
    brokers: TwoBrokers,
) -> None:
    """Its clock stood still and its driver heard nothing, so that only the agent and the row are left."""
    brokers.start_on_a_leased_device()
    brokers.end()
    outcome = brokers.outcome
    assert outcome.wrong == []
    assert outcome.sent.total() == outcome.refused.total() == 1
    [seconds] = outcome.takeovers
    print(f"the next one led after {seconds:.2f} s")
    assert seconds <= TAKEOVER_SECONDS
