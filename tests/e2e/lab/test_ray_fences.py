"""What an agent makes of a leader whose time is over."""

import asyncio

import pytest
from gpubroker_server.adapters.ray.driver.executor import RayExecutor
from gpubroker_server.core.domain.leader_term import LeaderTerm
from gpubroker_server.core.domain.orders import TermRefused
from gpubroker_server.core.domain.units import Lineage, Term

from tests.e2e.ray_lab import Lab, SystemClock
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_leader_of_an_older_term_is_refused_and_changes_nothing(lab: Lab) -> None:
    incarnation = (await lab.announce_again()).node.incarnation
    late = RayExecutor(lab.options, SystemClock())
    starting = asyncio.create_task(late.start(LeaderTerm(Term(lab.term - 1)), Lineage(0)))
    async with asyncio.timeout(PATIENCE_SECONDS):
        [refused] = await late.reports()
        await starting  # a refusal is an answer
    name = (await lab.node()).node.name
    assert refused == TermRefused(name, Lineage(0), Term(lab.term))
    assert "knows a later term" in late.status()["message"]
    run = await lab.start("add", 1, 2, shareable=True)
    assert await run.result() == 3
    await late.close(stop_cluster=False)
    assert (await lab.node()).node.incarnation == incarnation
