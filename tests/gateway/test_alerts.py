"""Each alert of the page on monitoring fires while what it names is there, and not before or afterwards.

`tests/bootstrap/test_alerts.py` does the same with processes that are lost, and
`tests/e2e/test_three_nodes.py` with nodes.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from math import ceil
from typing import Any

import pytest
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import Gone, NodeLost
from gpubroker_server.core.domain.units import NodeName, Term
from gpubroker_server.core.lifecycle.silent_nodes import PausedDetection
from gpubroker_server.ports.store import HeldBack
from gpubroker_server.telemetry.exposition import text_of
from gpubroker_server.telemetry.metrics import Telemetry
from gpubroker_server.telemetry.table import ServerRow

from tests.alerts import Alert, Alertmanager, Scrapes, documented
from tests.builders import GIB, a_device, a_sample
from tests.gateway.harness import Client, Gateway

STEP_SECONDS = 15.0
"""Between two scrapes."""


class Watched:
    """A gateway and the alerts about it."""

    def __init__(self, gateway: Gateway, api: Client) -> None:
        self.gateway, self.api = gateway, api
        self.answers = True
        self.telemetry: Telemetry = gateway.app.state.telemetry
        self._found: dict[str, Any] = {}
        self._alerts = Alertmanager(Scrapes(one=self._metrics))

    def _metrics(self) -> str | None:
        return text_of(self.telemetry.metrics()).decode() if self.answers else None

    def measure(self, **found: Any) -> None:
        """What is found on gpu0 from now on; the others are empty."""
        self._found = found
        self._measure()

    def _measure(self) -> None:
        world, now = self.gateway.world, self.gateway.clock.now()
        uuids = [ledger.device.uuid for ledger in world.ledgers.values()]
        world.measure(a_sample(uuid, now, **(self._found if uuid == "gpu0" else {})) for uuid in uuids)

    def firing(self, seconds: float = 0.0) -> set[str]:
        """When the present state has lasted so long."""
        for _ in range(1 + ceil(seconds / STEP_SECONDS)):
            self.gateway.clock.advance(STEP_SECONDS)
            self._measure()
            self._alerts.look(self.gateway.clock.now())
        return self._alerts.firing()


@asynccontextmanager
async def no_answer(watched: Watched) -> AsyncIterator[None]:
    watched.answers = False
    yield
    watched.answers = True


@asynccontextmanager
async def no_leader(watched: Watched) -> AsyncIterator[None]:
    watched.gateway.has_leader = False
    yield
    watched.gateway.has_leader = True


@asynccontextmanager
async def takeovers(watched: Watched) -> AsyncIterator[None]:
    for _ in range(4):
        watched.firing()
        watched.gateway.term = Term(watched.gateway.term + 1)
    yield
    watched.firing(600.0)  # so long it looks back


@asynccontextmanager
async def an_old_world(watched: Watched) -> AsyncIterator[None]:
    watched.gateway.age = 11.0
    yield
    watched.gateway.age = 0.3


@asynccontextmanager
async def a_full_disk(watched: Watched) -> AsyncIterator[None]:
    watched.gateway.full = "disk full: /data"
    yield
    watched.gateway.full = ""


@asynccontextmanager
async def a_silent_node(watched: Watched) -> AsyncIterator[None]:
    watched.gateway.silent = {NodeName("n1"): watched.gateway.clock.now()}
    yield
    watched.gateway.silent = {}


@asynccontextmanager
async def silent_nodes(watched: Watched) -> AsyncIterator[None]:
    """Of which the metric for each node tells too."""
    nodes = NodeName("n8"), NodeName("n9")
    watched.gateway.paused_nodes = PausedDetection("too many", nodes, 7, 9, watched.gateway.clock.now())
    yield
    watched.gateway.paused_nodes = None


@asynccontextmanager
async def a_lost_gpu(watched: Watched) -> AsyncIterator[None]:
    agent = {"gpu_faults": {"GPU 3": "GPU is lost"}}
    watched.gateway.executor = {**watched.gateway.executor, "agents": {"n1": agent, "n2": {"gpu_faults": {}}}}
    yield
    watched.gateway.executor = {**watched.gateway.executor, "agents": {"n1": {"gpu_faults": {}}}}


@asynccontextmanager
async def a_closed_gpu(watched: Watched) -> AsyncIterator[None]:
    await watched.gateway.join(a_device("gpu0", simulated=False))
    await watched.api.post("/gpus/gpu0/close", json={"reason": "a fan"})
    watched.measure()
    yield
    await watched.api.post("/gpus/gpu0/reopen")
    watched.measure()


@asynccontextmanager
async def quarantined_memory(watched: Watched) -> AsyncIterator[None]:
    """Of a node that is lost."""
    gateway = watched.gateway
    task = await watched.api.submit(resources={"gpu_mb": 8 * GIB})
    await gateway.admit(task)
    row, node = gateway.task(task), gateway.world.nodes[NodeName("n1")]
    await gateway.hear(NodeLost(node.name, node.incarnation, gateway.clock.now(), "no beat"))
    yield
    await gateway.reopen()
    await gateway.hear(Gone(row.id, row.fence, gateway.clock.now(), Proof.PROCESS_ABSENT))


@asynccontextmanager
async def foreign_memory(watched: Watched) -> AsyncIterator[None]:
    watched.measure(used_mb=4 * GIB, foreign_mb=4 * GIB)
    yield
    watched.measure()


@asynccontextmanager
async def overuse(watched: Watched) -> AsyncIterator[None]:
    task = await watched.api.submit(resources={"gpu_mb": 8 * GIB})
    await watched.gateway.admit(task)
    watched.measure(used_mb=9 * GIB, by_holder={f"{task}:1": 9 * GIB})
    yield
    await watched.gateway.end(task)
    watched.measure()


@asynccontextmanager
async def scattered_memory(watched: Watched) -> AsyncIterator[None]:
    """60 GiB are free, in two halves."""
    gateway, api = watched.gateway, watched.api
    await gateway.join(a_device(), a_device("gpu1"))
    watched.measure()
    runs = [await api.submit(resources={"gpu_mb": 50 * GIB}) for _ in range(2)]
    for run in runs:
        await gateway.admit(run)
    waiting = await api.submit(resources={"gpu_mb": 40 * GIB})
    yield
    await api.post(f"/tasks/{waiting}/cancel")


@asynccontextmanager
async def a_server_that_failed(watched: Watched) -> AsyncIterator[None]:
    up = [False]
    watched.telemetry.show_servers(lambda: [ServerRow("triton", [("http", up[0], 3)], 0, 0)])
    yield
    up[0] = True


@asynccontextmanager
async def an_old_transaction(watched: Watched) -> AsyncIterator[None]:
    watched.telemetry.note_held_back(HeldBack(301.0, 0))
    yield
    watched.telemetry.note_held_back(HeldBack(0.0, 0))


@asynccontextmanager
async def an_old_slot(watched: Watched) -> AsyncIterator[None]:
    watched.telemetry.note_held_back(HeldBack(0.0, 10_000_001))
    yield
    watched.telemetry.note_held_back(HeldBack(0.0, 0))


FAULTS: Mapping[str, Callable[[Watched], AbstractAsyncContextManager[None]]] = {
    "up": no_answer,
    "gpubroker_leader_known": no_leader,
    "gpubroker_leader_term": takeovers,
    "gpubroker_world_age_seconds": an_old_world,
    "gpubroker_disk_full": a_full_disk,
    "gpubroker_node_ready": a_silent_node,
    "gpubroker_silent_nodes": silent_nodes,
    "gpubroker_node_gpu_faults": a_lost_gpu,
    "gpubroker_gpu_closed": a_closed_gpu,
    "gpubroker_gpu_memory_quarantined_bytes": quarantined_memory,
    "gpubroker_gpu_memory_foreign_bytes": foreign_memory,
    "gpubroker_gpu_memory_overused_bytes": overuse,
    "gpubroker_gpu_memory_scattered": scattered_memory,
    "gpubroker_model_server_up": a_server_that_failed,
    "gpubroker_database_oldest_transaction_seconds": an_old_transaction,
    "gpubroker_database_oldest_slot_transactions": an_old_slot,
}
ALSO = {"gpubroker_gpu_memory_quarantined_bytes": {"gpubroker_node_ready"}}
"""What fires beside the one named, for the same fault."""


@pytest.mark.parametrize("alert", documented(), ids=lambda alert: alert.metric)
async def test_an_alert_fires_while_its_fault_lasts_and_no_other_does(
    gateway: Gateway, api: Client, alert: Alert
) -> None:
    watched = Watched(gateway, api)
    assert watched.firing(60.0) == set()
    async with FAULTS[alert.metric](watched):
        assert (alert.metric in watched.firing()) is (alert.hold_seconds == 0), "not before its time"
        assert watched.firing(alert.hold_seconds) == {alert.metric} | ALSO.get(alert.metric, set())
    assert watched.firing() == set()


async def test_without_a_leader_nothing_is_claimed_about_nodes(gateway: Gateway, api: Client) -> None:
    gateway.has_leader = False
    text = (await api.get("/metrics")).text
    assert "gpubroker_leader_known 0.0" in text
    for absent in ("leader_term", "leader_lease_seconds", "node_ready", "silent_nodes"):
        assert f"\ngpubroker_{absent}" not in text, "its row may be of a node that died meanwhile"
