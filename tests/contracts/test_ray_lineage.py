"""What an agent makes of a database that went back."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.contracts.fake_runners import FakeRunners, Leader, a_leader


@pytest.fixture
def leader(runners: FakeRunners, tmp_path: Path) -> Leader:
    return a_leader(runners, tmp_path)


async def test_later_lineage_is_welcome_whatever_its_term_and_an_earlier_is_not(
    runners: FakeRunners, leader: Leader
) -> None:
    before = leader
    before.term = 9
    await before.announce()
    await before.start("run")
    await before.until(lambda: "run" in runners.started)
    restored = Leader(before.agent, before.config, term=3, lineage=70_000_000)
    assert await restored.announce() == "welcome"
    seen = await restored.receive("node_seen")
    assert seen[4] == (("run", 1, 0),)  # what runs is reported before any order is taken
    assert await before.agent.announce(before.protocol, before.config.to_json(), "broker", 0, 10) == (
        "stale", 70_000_000, 3,
    )  # fmt: skip
    with capture_logs() as lines:
        await before.stop("run")
    assert [line["fault"] for line in lines if "a term that is over" in line["event"]] == [
        "it is term 3 of lineage 70000000"
    ]
    await restored.stop("run")
    assert (await restored.receive("gone", "run"))[5] == "process_absent"


async def test_a_term_that_is_given_to_a_second_process_is_refused(leader: Leader) -> None:
    await leader.announce()
    other = Leader(leader.agent, leader.config)
    other.broker = "another process"
    assert await other.announce() == "stale"
    assert await leader.announce() == "welcome"  # as after the loss of its driver


async def test_a_start_with_a_fence_that_was_heard_before_is_answered(leader: Leader) -> None:
    """A database that went back, and does not know that, gives the numbers of claims again."""
    await leader.announce()
    await leader.stop("task")  # for a claim that this agent has never had: it will not start it any more
    assert (await leader.receive("gone", "task"))[5] == "never_started"
    leader.received.clear()
    await leader.start("task")
    assert (await leader.receive("ended", "task"))[5] == "never_started"
    assert (await leader.receive("gone", "task"))[5] == "never_started"
