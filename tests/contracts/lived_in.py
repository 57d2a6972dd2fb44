"""A database in which there is something of everything, and all that anybody can read of one."""

from typing import Any

from gpubroker_server.adapters.sql.store import SqlStore
from gpubroker_server.core.domain.orders import Ending
from gpubroker_server.core.domain.units import Position
from gpubroker_server.ports.store import TaskFilter, TokenRow

from tests.builders import GIB
from tests.chaos.operations import quarantined
from tests.chaos.scene import Scene
from tests.contracts.scenes import next_term, picture
from tests.core.gangs import bundles


async def live_in(store: SqlStore) -> None:
    term = await next_term(store)
    scene = await Scene.on(store, term)
    await scene.commit(scene.node_answers())
    await quarantined(scene, "quarantined")
    await scene.begin("running", priority=40)
    await scene.commit(scene.apply_reports(scene.checkpoint("running")))
    await scene.begin("failed")
    await scene.commit(scene.apply_reports(*scene.ends("failed", Ending.FAILED), *scene.gone("failed")))
    await scene.submit("keyed", key="a key", gpu_mb=70 * GIB)
    await scene.submit("gang", bundles=bundles(2, gpu_mb=60 * GIB), priority=80)
    await scene.submit("quote", gpu_mb=75 * GIB, name='\\N and "quotes",\ttabs, lines\nand 漢字')
    await scene.ask("running", "cancel", grace_seconds=30)
    token = TokenRow("ci", "default", ("tasks:read",), 50, sha256="hash", created_at=scene.now)
    await store.put_token(token, by="admin")


async def all_of(store: SqlStore) -> dict[str, Any]:
    """What anybody can read of it."""
    events = await store.events(Position(0), 10_000)
    records = await store.records(TaskFilter("default", limit=1000))
    ids = [record.task.id for record in records]
    scene = await Scene.on(store, (await store.leader()).term)
    return {
        "picture": picture(scene.world),
        "head": await store.head(),
        "events": events,
        "records": records,
        "specs": await store.specs(ids),
        "results": [await store.result(id) for id in ids],
        "checkpoints": [await store.checkpoints(id) for id in ids],
        "tokens": await store.tokens(),
        "leader": ((await store.leader()).term, (await store.leader()).holder),
    }
