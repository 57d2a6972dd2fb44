"""Everything that is written in one transaction: what comes before it, and the one call that writes it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from gpubroker_server.core.domain.orders import Ending, NodeLost
from gpubroker_server.core.domain.policy import Cutoffs
from gpubroker_server.core.domain.units import Instant, Position, Seconds
from gpubroker_server.ports.store import TokenRow

from tests.builders import GIB
from tests.chaos.scene import NODE, Scene
from tests.contracts.scenes import next_term
from tests.core.gangs import bundles

Act = Callable[[Scene, str], Awaitable[Any]]
"""(the scene, the id of a task of its own): the call and its answer."""


async def nothing(scene: Scene, id: str) -> None:
    """Nothing has to come before."""


@dataclass(frozen=True)
class Operation:
    act: Act
    before: Act = nothing
    takes_out: bool = False
    """Rows and events go: what was in the log until then must have been read."""


async def pending(scene: Scene, id: str) -> None:
    await scene.submit(id)


async def admitted(scene: Scene, id: str) -> None:
    await scene.submit(id)
    await scene.carry(scene.plan())


async def running(scene: Scene, id: str) -> None:
    await scene.begin(id, max_retries=1, timeout_seconds=3600.0)


async def ended(scene: Scene, id: str) -> None:
    await running(scene, id)
    await scene.carry(scene.hear(*scene.ends(id)))


async def quarantined(scene: Scene, id: str) -> None:
    await ended(scene, id)
    await scene.carry(scene.due_in(900.0))


async def vouched_for(scene: Scene, id: str) -> None:
    await quarantined(scene, id)
    leases = [lease.key for lease in scene.world.leases_of(scene.task(id))]
    await scene.ask(id, "attest", leases=leases, by="olga", reason="the machine was switched off")


async def outweighed(scene: Scene, id: str) -> None:
    """It has all there is, and somebody more urgent waits for a part of it."""
    await scene.begin(id, gpu_mb=80 * GIB, gpus=2, priority=10)
    await scene.submit(f"{id}-high", gpu_mb=60 * GIB, priority=90)


async def gives_way(scene: Scene, id: str) -> None:
    await outweighed(scene, id)
    await scene.carry(scene.plan())


async def has_given_way(scene: Scene, id: str) -> None:
    await gives_way(scene, id)
    await scene.carry(scene.hear(*scene.leaves(id)))


async def not_wanted_any_more(scene: Scene, id: str) -> None:
    await running(scene, id)
    await scene.ask(id, "cancel", grace_seconds=30)


async def waits_in_vain(scene: Scene, id: str) -> None:
    await scene.submit(id, gpu_mb=200 * GIB, expires_at=Instant(scene.now + 60.0), queue_ttl_seconds=60.0)


async def gang(scene: Scene, id: str) -> None:
    await scene.submit(id, bundles=bundles(2, gpu_mb=60 * GIB))


async def node_was_lost(scene: Scene, id: str) -> None:
    await running(scene, id)
    await scene.carry(lose_node(scene))


async def has_token(scene: Scene, id: str) -> None:
    await scene.store.put_token(a_token(scene, id), by="chaos")


def a_token(scene: Scene, id: str) -> TokenRow:
    return TokenRow(id, f"hash of {id}", "default", ("*",), 100, scene.now)


def lose_node(scene: Scene) -> Any:
    node = scene.world.nodes[NODE]
    return scene.hear(NodeLost(node.name, node.incarnation, scene.now, "lost by the test"))


async def several_at_once(scene: Scene, id: str) -> Any:
    """One turn's work of many people and of the leader, which shares one transaction."""
    newcomers = (scene.submit(f"{id}-{n}", key=f"key {id} {n}") for n in range(3))
    return await asyncio.gather(scene.carry(scene.hear(*scene.ends(id))), *newcomers)


async def is_over(scene: Scene, id: str) -> None:
    """Nothing else is, and its memory is free."""
    while await prune(scene, id):
        pass
    await scene.begin(id)
    await scene.carry(scene.hear(*scene.ends(id)))
    await scene.carry(scene.hear(*scene.leaves(id)))


async def prune(scene: Scene, id: str) -> bool:
    later = Instant(scene.now + 1e6)
    return await scene.store.prune(scene.term, Cutoffs(later, later, Instant(0.0), Position(10**9)))


async def takes_the_term(scene: Scene, id: str) -> Any:
    scene.term = await next_term(scene.store, f"leader of {id}")
    return scene.term


OPERATIONS: dict[str, Operation] = {
    "submit": Operation(lambda scene, id: scene.submit(id)),
    "submit with a key": Operation(lambda scene, id: scene.submit(id, key=f"key {id}")),
    "submit a batch": Operation(lambda scene, id: scene.submit_batch(*(f"{id}-{n}" for n in range(3)))),
    "submit a gang": Operation(gang),
    "ask to cancel": Operation(lambda scene, id: scene.ask(id, "cancel"), running),
    "admit": Operation(lambda scene, id: scene.carry(scene.plan()), pending),
    "admit a gang": Operation(lambda scene, id: scene.carry(scene.plan()), gang),
    "start": Operation(lambda scene, id: scene.carry(scene.hear(*scene.starts(id))), admitted),
    "checkpoint": Operation(lambda scene, id: scene.carry(scene.hear(scene.saves(id))), running),
    "finish": Operation(lambda scene, id: scene.carry(scene.hear(*scene.ends(id))), running),
    "finish and leave": Operation(
        lambda scene, id: scene.carry(scene.hear(*scene.starts(id), *scene.ends(id), *scene.leaves(id))),
        admitted,
    ),
    "release": Operation(lambda scene, id: scene.carry(scene.hear(*scene.leaves(id))), ended),
    "retry": Operation(lambda scene, id: scene.carry(scene.hear(*scene.ends(id, Ending.FAILED))), running),
    "preempt": Operation(lambda scene, id: scene.carry(scene.plan()), outweighed),
    "give way": Operation(lambda scene, id: scene.carry(scene.hear(*scene.leaves(id))), gives_way),
    "take what was pledged": Operation(lambda scene, id: scene.carry(scene.plan()), has_given_way),
    "cancel": Operation(lambda scene, id: scene.carry(scene.settle_requests()), not_wanted_any_more),
    "expire": Operation(lambda scene, id: scene.carry(scene.due_in(120.0)), waits_in_vain),
    "stop for time": Operation(lambda scene, id: scene.carry(scene.due_in(4000.0)), running),
    "quarantine": Operation(lambda scene, id: scene.carry(scene.due_in(900.0)), ended),
    "release from quarantine": Operation(
        lambda scene, id: scene.carry(scene.hear(*scene.leaves(id, "boot_changed"))), quarantined
    ),
    "state that it is gone": Operation(lambda scene, id: scene.carry(scene.settle_requests()), vouched_for),
    "lose a node": Operation(lambda scene, id: scene.carry(lose_node(scene)), running),
    "find a node again": Operation(lambda scene, id: scene.carry(scene.node_answers()), node_was_lost),
    "several at once": Operation(several_at_once, running),
    "take out what is over": Operation(prune, is_over, takes_out=True),
    "take the term": Operation(takes_the_term),
    "renew the term": Operation(lambda scene, id: scene.store.renew(scene.term, Seconds(3600.0))),
    "put a token": Operation(lambda scene, id: scene.store.put_token(a_token(scene, id), by="chaos")),
    "drop a token": Operation(lambda scene, id: scene.store.drop_token(id, by="chaos"), has_token),
}
