"""Several processes that are one task: they begin together, know their places and find each other."""

import asyncio
import os
import signal
import sys
from typing import Any

import pytest
from gpubroker_server.core.domain.orders import Checkpointed, Ended, Ending, Gone, NodeReport, Ready, Started

from tests.contracts.executor_bench import Run
from tests.e2e.ray_lab import Lab, agents_of, is_there, marked_with

pytestmark = pytest.mark.asyncio(loop_scope="session")

PRINT_PLACE = (
    "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')))"
)


async def a_gang(lab: Lab, size: int, name: str, *args: Any, **given: Any) -> list[Run]:
    """Ranks that are ready and wait."""
    first = await lab.start(name, *args, world_size=size, **given)
    again = {**given, "task": first.order.task}
    ranks = [first, *[await lab.start(name, *args, rank=n, world_size=size, **again) for n in range(1, size)]]
    await asyncio.gather(*(rank.first(Ready) for rank in ranks))
    return ranks


async def let_go(ranks: list[Run]) -> str:
    """Where they meet."""
    address = (await ranks[0].first(Ready)).address
    for rank in ranks:
        await rank.go(address)
    return address


async def test_four_ranks_add_up_their_numbers_over_sockets(lab: Lab) -> None:
    ranks = await a_gang(lab, 4, "add_up_all_ranks", 2.5, gpu_mb=1000)
    await let_go(ranks)
    assert [await rank.result() for rank in ranks] == [25.0] * 4
    assert len({(await rank.first(Started)).pid for rank in ranks}) == 4
    await asyncio.gather(*(rank.first(Gone) for rank in ranks))


async def test_a_rank_knows_its_place_and_sees_its_own_devices(lab: Lab) -> None:
    ranks = await a_gang(lab, 2, "where_am_i", gpu_mb=1000)
    address = await let_go(ranks)
    host, _, port = address.rpartition(":")
    for number, rank in enumerate(ranks):
        assert await rank.result() == {
            "rank": number,
            "world_size": 2,
            "meet": address,
            "environment": [str(number), "2", "0", host, port, "GPU-sim-0"],
        }


async def test_a_task_of_one_process_has_no_rendezvous(lab: Lab) -> None:
    alone = await (await lab.start("where_am_i")).result()
    assert alone == {"rank": 0, "world_size": 1, "meet": "", "environment": ["0", "1", None, None, None, ""]}


async def test_gang_command_begins_when_all_are_ready_and_knows_its_place(lab: Lab) -> None:
    """It finds its place in its environment."""
    command = {"kind": "command", "command": (sys.executable, "-c", PRINT_PLACE), "arguments": b""}
    ranks = await a_gang(lab, 2, "", **command)
    host, _, port = (await let_go(ranks)).rpartition(":")
    for number, rank in enumerate(ranks):
        assert (await rank.first(Ended)).log_tail == f"{number} 2 {host} {port}\n".encode()


async def test_a_function_that_cannot_be_opened_fails_before_any_rank_begins(lab: Lab) -> None:
    broken = await lab.start("not_there", world_size=2)
    ended = await broken.first(Ended)
    assert (ended.ending, ended.failure and ended.failure.kind) == (Ending.FAILED, "import_failed")
    await broken.first(Gone)
    assert broken.order_of_kinds() == ["Started", "Ended", "Gone"]


async def test_a_killed_rank_does_not_end_the_others_of_its_node(lab: Lab) -> None:
    ranks = await a_gang(lab, 3, "wait", 600, gpu_mb=1000)
    await let_go(ranks)
    os.kill((await ranks[1].first(Started)).pid, signal.SIGKILL)
    assert (await ranks[1].first(Ended)).ending is Ending.LOST
    await ranks[1].first(Gone)
    for rank in (ranks[0], ranks[2]):
        assert is_there((await rank.first(Started)).pid)
        await rank.stop(grace_seconds=20)
        assert (await rank.first(Ended)).ending is Ending.STOPPED
        await rank.first(Gone)
    assert marked_with(f"{ranks[0].order.task}:1:2") == []


async def test_rank_zero_saves_the_state_for_all(lab: Lab) -> None:
    ranks = await a_gang(lab, 2, "keep_a_state")
    await let_go(ranks)
    saved = (await ranks[0].first(Checkpointed)).data
    await asyncio.gather(*(rank.first(Gone) for rank in ranks))
    assert "Checkpointed" not in ranks[1].order_of_kinds()
    resumed = await a_gang(lab, 2, "keep_a_state", resume_state=saved)
    await let_go(resumed)
    assert [await rank.result() for rank in resumed] == ["of rank 0"] * 2


async def test_waiting_ranks_outlive_the_agent_and_begin_under_the_next(lab: Lab) -> None:
    ranks = await a_gang(lab, 2, "add_up_all_ranks", 1.0, gpu_mb=1000)
    before = len(lab.nodes)
    [agent] = agents_of(lab.head)
    os.kill(agent, signal.SIGKILL)
    await lab.until(lambda: [node for node in lab.nodes[before:] if isinstance(node, NodeReport)])
    await lab.until(lambda: all("Ready" in rank.order_of_kinds()[2:] for rank in ranks))
    await let_go(ranks)
    assert [await rank.result() for rank in ranks] == [3.0, 3.0]
    for rank in ranks:
        assert (await rank.first(Gone)).proof == "process_absent"
