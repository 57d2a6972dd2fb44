"""Explain, simulate and plan leave every row and the whole World as they were."""

import sqlite3
from pathlib import Path

from tests.builders import GIB
from tests.gateway.harness import Client, Gateway, a_body


def rows(database: Path) -> list[str]:
    """Every table with every row, as SQL."""
    with sqlite3.connect(database) as connection:
        return list(connection.iterdump())


def picture(gateway: Gateway) -> str:
    """The whole World as text."""
    world = gateway.world
    plain = {
        name: value for name, value in vars(world).items() if isinstance(value, dict | set | int | float)
    }
    ledgers = {key: (ledger.holdings, ledger.pledges, ledger.sample) for key, ledger in world.ledgers.items()}
    queue = {key: list(group) for key, group in world.queue.groups.items()}
    uses = {node: (use.cpu, use.memory_mb, use.runs, use.priorities) for node, use in world.use.items()}
    return repr({**plain, "ledgers": ledgers, "use": uses, "queue": queue})


async def test_questions_change_no_row_and_nothing_in_the_world(gateway: Gateway, api: Client) -> None:
    database = gateway.store.path
    low = await api.submit(resources={"gpu_mb": 60 * GIB}, priority=20)
    await gateway.admit(low)
    gateway.clock.advance(1.0)
    waiting = await api.submit(resources={"gpu_mb": 70 * GIB}, priority=20)
    before = rows(database), picture(gateway)
    assert any(waiting in line for line in before[0])
    verdicts = [
        (await api.post("/tasks/simulate", json=a_body(resources=resources))).json()["verdict"]
        for resources in ({"gpu_mb": 1}, {"gpu_mb": 40 * GIB}, {"gpus": 9}, {"bundles": [{"gpus": 1}]})
    ]
    assert verdicts == ["starts", "preempts", "refused", "preempts"]
    fleet = {"components": [{"name": "one", "count": 3, "resources": {"gpu_mb": 30 * GIB}, "priority": 60}]}
    assert (await api.post("/plan", json=fleet)).json()["displaced"][0]["id"] == low
    assert (await api.get(f"/tasks/{waiting}/explain")).json()["remedies"]
    assert (rows(database), picture(gateway)) == before
