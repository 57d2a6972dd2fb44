"""Every operation that writes in one transaction: its preparation, and the call that writes."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import Ending, NodeLost
from gpubroker_server.core.domain.policy import Cutoffs
from gpubroker_server.core.domain.units import Instant, Position, Seconds
from gpubroker_server.ports.store import TokenRow
from msgspec import Struct

from tests.builders import GIB
from tests.chaos.scene import NODE, Scene
from tests.contracts.scenes import next_term
from tests.core.gangs import bundles

Act = Callable[[Scene, str], Awaitable[Any]]
"""(scene, id of a new task) -> the answer of the call."""


async def nothing(scene: Scene, id: str) -> None:
    """No preparation."""


class Operation(Struct, frozen=True):
    act: Act
    before: Act = nothing
    prunes: bool = False
    """Deletes rows and events, so the log has to be read before."""


async def pending(scene: Scene, id: str) -> None:
    await scene.submit(id)


async def admitted(scene: Scene, id: str) -> None:
    await scene.submit(id)
    await scene.commit(scene.plan())


async def running(scene: Scene, id: str) -> None:
    await scene.begin(id, max_retries=1, timeout_seconds=3600.0)


async def ended(scene: Scene, id: str) -> None:
    await running(scene, id)
    await scene.commit(scene.apply_reports(*scene.ends(id)))


async def quarantined(scene: Scene, id: str) -> None:
    await ended(scene, id)
    await scene.commit(scene.due_in(900.0))


async def attested(scene: Scene, id: str) -> None:
    await quarantined(scene, id)
    leases = [lease.key for lease in scene.world.leases_of(scene.task(id))]
    await scene.ask(id, "attest", leases=leases, by="olga", reason="the machine was switched off")


async def has_a_preemptor(scene: Scene, id: str) -> None:
    """The task holds all GPUs, and a task of higher priority waits for a part."""
    await scene.begin(id, gpu_mb=80 * GIB, gpus=2, priority=10)
    await scene.submit(f"{id}-high", gpu_mb=60 * GIB, priority=90)


async def preempted(scene: Scene, id: str) -> None:
    await has_a_preemptor(scene, id)
    await scene.commit(scene.plan())


async def made_room(scene: Scene, id: str) -> None:
    await preempted(scene, id)
    await scene.commit(scene.apply_reports(*scene.gone(id)))


async def asked_to_cancel(scene: Scene, id: str) -> None:
    await running(scene, id)
    await scene.ask(id, "cancel", grace_seconds=30)


async def about_to_expire(scene: Scene, id: str) -> None:
    await scene.submit(id, gpu_mb=200 * GIB, expires_at=Instant(scene.now + 60.0), queue_ttl_seconds=60.0)


async def gang(scene: Scene, id: str) -> None:
    await scene.submit(id, bundles=bundles(2, gpu_mb=60 * GIB))


async def after_node_loss(scene: Scene, id: str) -> None:
    await running(scene, id)
    await scene.commit(lose_node(scene))


async def has_token(scene: Scene, id: str) -> None:
    await scene.store.put_token(a_token(scene, id), by="chaos")


def a_token(scene: Scene, id: str) -> TokenRow:
    return TokenRow(id, "default", ("*",), 100, sha256=f"hash of {id}", created_at=scene.now)


def lose_node(scene: Scene) -> Any:
    node = scene.world.nodes[NODE]
    return scene.apply_reports(NodeLost(node.name, node.incarnation, scene.now, "lost by the test"))


async def several_at_once(scene: Scene, id: str) -> Any:
    """Submits and a leader's decision that share one transaction."""
    submits = (scene.submit(f"{id}-{n}", key=f"key {id} {n}") for n in range(3))
    return await asyncio.gather(scene.commit(scene.apply_reports(*scene.ends(id))), *submits)


async def over(scene: Scene, id: str) -> None:
    """The only task that has ended; its memory is released."""
    while await prune(scene, id):
        pass
    await scene.begin(id)
    await scene.commit(scene.apply_reports(*scene.ends(id)))
    await scene.commit(scene.apply_reports(*scene.gone(id)))


async def prune(scene: Scene, id: str) -> bool:
    later = Instant(scene.now + 1e6)
    return await scene.store.prune(
        scene.term, Cutoffs(later, later, Instant(0.0), Instant(0.0), Position(10**9))
    )


async def takes_the_term(scene: Scene, id: str) -> Any:
    scene.term = await next_term(scene.store, f"leader of {id}")
    return scene.term


OPERATIONS: dict[str, Operation] = {
    "submit": Operation(lambda scene, id: scene.submit(id)),
    "submit with a key": Operation(lambda scene, id: scene.submit(id, key=f"key {id}")),
    "submit a batch": Operation(lambda scene, id: scene.submit_batch(*(f"{id}-{n}" for n in range(3)))),
    "submit a gang": Operation(gang),
    "ask to cancel": Operation(lambda scene, id: scene.ask(id, "cancel"), running),
    "admit": Operation(lambda scene, id: scene.commit(scene.plan()), pending),
    "admit a gang": Operation(lambda scene, id: scene.commit(scene.plan()), gang),
    "start": Operation(lambda scene, id: scene.commit(scene.apply_reports(*scene.starts(id))), admitted),
    "checkpoint": Operation(
        lambda scene, id: scene.commit(scene.apply_reports(scene.checkpoint(id))), running
    ),
    "finish": Operation(lambda scene, id: scene.commit(scene.apply_reports(*scene.ends(id))), running),
    "finish and release": Operation(
        lambda scene, id: scene.commit(
            scene.apply_reports(*scene.starts(id), *scene.ends(id), *scene.gone(id))
        ),
        admitted,
    ),
    "release": Operation(lambda scene, id: scene.commit(scene.apply_reports(*scene.gone(id))), ended),
    "retry": Operation(
        lambda scene, id: scene.commit(scene.apply_reports(*scene.ends(id, Ending.FAILED))), running
    ),
    "preempt": Operation(lambda scene, id: scene.commit(scene.plan()), has_a_preemptor),
    "release for a preemptor": Operation(
        lambda scene, id: scene.commit(scene.apply_reports(*scene.gone(id))), preempted
    ),
    "consume a pledge": Operation(lambda scene, id: scene.commit(scene.plan()), made_room),
    "cancel": Operation(lambda scene, id: scene.commit(scene.settle_requests()), asked_to_cancel),
    "expire": Operation(lambda scene, id: scene.commit(scene.due_in(120.0)), about_to_expire),
    "time out": Operation(lambda scene, id: scene.commit(scene.due_in(4000.0)), running),
    "quarantine": Operation(lambda scene, id: scene.commit(scene.due_in(900.0)), ended),
    "release from quarantine": Operation(
        lambda scene, id: scene.commit(scene.apply_reports(*scene.gone(id, Proof.BOOT_CHANGED))), quarantined
    ),
    "attest": Operation(lambda scene, id: scene.commit(scene.settle_requests()), attested),
    "lose a node": Operation(lambda scene, id: scene.commit(lose_node(scene)), running),
    "node returns": Operation(lambda scene, id: scene.commit(scene.node_answers()), after_node_loss),
    "several at once": Operation(several_at_once, running),
    "prune": Operation(prune, over, prunes=True),
    "take the term": Operation(takes_the_term),
    "renew the term": Operation(lambda scene, id: scene.store.renew(scene.term, Seconds(3600.0))),
    "put a token": Operation(lambda scene, id: scene.store.put_token(a_token(scene, id), by="chaos")),
    "drop a token": Operation(lambda scene, id: scene.store.drop_token(id, by="chaos"), has_token),
}
