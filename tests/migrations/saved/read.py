"""Follow the log of a database with the software at hand, and print the tasks and leases that it makes.

Run it with the software of a release:

    PYTHONPATH=TREE/service:TREE/client python read.py URL
"""

import asyncio
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from gpubroker_server.adapters.sql.store import open_store
from gpubroker_server.core.world.world import World

with suppress(ImportError):  # earlier releases lack it
    from gpubroker_server.core.world.payload import fields_of_holder

TASK = (
    "tenant",
    "name",
    "priority",
    "state",
    "version",
    "fence",
    "node",
    "max_retries",
    "started_at",
    "held",
)
LEASE = ("holder_kind", "holder", "mb", "state", "version", "rank", "overused_mb", "quarantined_at")


def facts(value: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def of_holder(task: Any, name: str) -> Any:
    """What only some tasks have: earlier releases have it beside the other fields."""
    return getattr(fields_of_holder(task.holder) if hasattr(task, "holder") else task, name, None)


def of_task(task: Any) -> Mapping[str, Any]:
    members = [[m.rank, m.node, m.state, m.gone, m.address] for m in of_holder(task, "members")]
    after = [[d.task, d.on_failure] for d in task.after]
    external, model = of_holder(task, "external"), of_holder(task, "model")
    return {
        **facts(task, TASK),
        "gpu_mb": task.demand.gpu_mb,
        "answered_by": task.demand.answered_by,
        "members": members,
        "array": of_holder(task, "array"),
        "external": None if external is None else facts(external, ("ttl_seconds", "pid")),
        "model": None if model is None else facts(model, ("server", "model", "pinned", "load_seconds")),
        "after": after,
    }


async def read(url: str) -> Mapping[str, Any]:
    store = await open_store(url)
    world = World()
    world.apply(await store.events(0, 10_000))  # type: ignore[arg-type]  # of an earlier release
    await store.close()
    return {
        "position": world.position,
        "tasks": {id: of_task(task) for id, task in world.tasks.items()},
        "leases": [facts(lease, LEASE) for held in world.leases.values() for lease in held.values()],
        "pledges": sorted(pledge.key for held in world.pledges.values() for pledge in held.values()),
        "requests": {id: request.what for id, request in world.requests.items()},
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(read(sys.argv[1]))))
