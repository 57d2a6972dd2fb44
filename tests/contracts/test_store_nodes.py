"""Nodes in rows and in the log."""

from gpubroker_server.core.domain.decisions import Decision, Request
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.lifecycle.change_requests import carry_out
from gpubroker_server.ports.store import TaskStore
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_device, a_node
from tests.contracts.scenes import log_of, node_seen, replayed, with_gpu


async def test_a_node_is_known_as_it_was_last_seen(store: TaskStore) -> None:
    term = await with_gpu(store)
    node = a_node(incarnation="n1-2", labels=(("zone", "a"),), custom=(("fpga", 2.0),), version=2)
    bigger = a_device(mb=96 * GIB, version=2)
    await store.commit(term, [node_seen(bigger, node=node)])
    snapshot = await store.snapshot()
    assert (list(snapshot.nodes), list(snapshot.devices)) == ([node], [bigger])


async def test_a_drained_node_is_the_same_in_rows_and_log_and_stays_drained(store: TaskStore) -> None:
    term = await with_gpu(store)
    about = {"by": "olga", "reason": "a fan", "deadline_seconds": 60.0}
    asked = Request("r", TaskId("n1"), "ops", "drain", about, NOW)
    await store.request(asked)
    world = replayed(await log_of(store))
    await store.commit(term, [carry_out(world, asked, NOW, Policy())])
    drained = a_node(cordoned=True, cordon_reason="a fan", draining_since=NOW, version=2)
    drained = replace(drained, drain_deadline_at=Instant(NOW + 60.0), cordoned_by="olga", cordoned_at=NOW)
    assert list((await store.snapshot()).nodes) == [drained]
    away = replace(drained, ready=False, version=3)
    await store.commit(term, [Decision("cluster", "take_over", nodes=(away,))])
    assert list((await store.snapshot()).nodes) == [away]
    assert list(replayed(await log_of(store)).nodes.values()) == [away]
