"""Which orders an agent refuses, and what it says of them."""

import asyncio

import pytest

from service.adapters.ray.executor import RayExecutor
from service.core.orders import Ended, Ending, Gone, NodeSeen, Started
from service.core.units import Term
from tests.e2e.ray_lab import Lab, SystemClock

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_start_for_another_incarnation_never_starts(lab: Lab) -> None:
    run = await lab.start("add", 1, 2, incarnation="somebody.1")
    assert (await run.first(Ended)).ending is Ending.NEVER_STARTED
    assert (await run.first(Gone)).proof == "never_started"
    assert run.order_of_kinds() == ["Ended", "Gone"]


async def test_a_claim_that_was_refused_once_never_starts_later(lab: Lab) -> None:
    refused = await lab.start("add", 1, 2, incarnation="somebody.1")
    await refused.first(Gone)
    again = await lab.start("add", 1, 2, task=refused.order.task)
    witness = await lab.start("add", 1, 2, shareable=True)
    await witness.result()
    assert not [report for report in again.reports if isinstance(report, Started)]


async def test_a_repeated_start_runs_once(lab: Lab) -> None:
    run = await lab.start("add", 1, 2)
    await run.first(Gone)
    before = list(run.reports)
    await lab.start("add", 1, 2, task=run.order.task)
    await (await lab.start("add", 1, 2)).first(Gone)
    assert run.reports == before


async def test_a_stop_for_a_run_that_is_not_known_is_answered_and_keeps_it_from_starting(lab: Lab) -> None:
    ghost = await lab.start("add", 1, 2, incarnation="somebody.1", task="ghost")
    await ghost.first(Gone)
    stopped = await lab.start("add", 1, 2, incarnation="somebody.1", task="ghost", fence=5)
    await stopped.stop(grace_seconds=5)
    assert (await stopped.first(Gone)).proof == "never_started"


async def test_a_leader_of_an_older_term_is_not_answered_and_disturbs_nobody(lab: Lab) -> None:
    incarnation = (await lab.node()).node.incarnation
    late = RayExecutor(lab.options, SystemClock())
    starting = asyncio.create_task(late.start(Term(0)))
    hearing = asyncio.create_task(late.reports())
    await lab.until(lambda: late.status()["message"] == "waiting for node agents")
    run = await lab.start("add", 1, 2, shareable=True)
    assert await run.result() == 3
    assert not hearing.done()
    starting.cancel()
    hearing.cancel()
    await late.close(stop_cluster=False)
    assert (await lab.node()).node.incarnation == incarnation


async def test_an_announcement_of_the_same_executor_tells_everything_again(lab: Lab) -> None:
    """Kept until it is forgotten: a leader that died before its commit hears of it again from the next."""
    run = await lab.start("add", 1, 2, gpu_mb=1000)
    await run.first(Gone)
    answers = len([node for node in lab.nodes if isinstance(node, NodeSeen)])
    await lab.executor.start(Term(2))
    await lab.until(lambda: len([n for n in lab.nodes if isinstance(n, NodeSeen)]) > answers)
    await lab.until(lambda: run.order_of_kinds() == ["Started", "Ended", "Gone"] * 2)
    assert (run.order.task, 1) in (await lab.node()).runs
    await run.forget()
    await lab.executor.start(Term(3))
    await lab.until(lambda: len([n for n in lab.nodes if isinstance(n, NodeSeen)]) > answers + 1)
    assert (run.order.task, 1) not in (await lab.node()).runs
