"""What the leader takes from reports besides decisions."""

import json
from pathlib import Path

from gpubroker_server.adapters.blobs.directory import DirectoryBlobs
from gpubroker_server.broker.observe import Observer
from gpubroker_server.core.domain.decisions import Request
from gpubroker_server.core.domain.device import NodeSample
from gpubroker_server.core.domain.lease import LeaseState, Proof
from gpubroker_server.core.domain.orders import Gone, Stacked, StackOrder
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Fence, Instant, Mib, MonotonicSeconds, NodeName, TaskId
from gpubroker_server.core.lifecycle.change_requests import STACK_SECONDS
from gpubroker_server.core.lifecycle.reconcile import InventoryRules

from tests.builders import GIB, NOW, a_device, a_sample, a_task, a_world, commit, holding, key


async def test_a_release_comes_with_the_sample_taken_after_the_process_was_gone(tmp_path: Path) -> None:
    task = a_task("ends", gpu_mb=60 * GIB)
    before = a_sample("gpu0", used_mb=60 * GIB, by_holder={"ends:1": 60 * GIB})
    world = a_world(a_device("gpu0"), holding(task, "gpu0"), before)
    blobs, rules = DirectoryBlobs(tmp_path), InventoryRules("test", Mib(0))
    observer = Observer(world, Policy(), blobs, rules, 65536, {}, lambda: MonotonicSeconds(NOW))
    now = Instant(NOW + 1.0)

    gone = Gone(
        TaskId("ends"), Fence(1), now, Proof.PROCESS_ABSENT, samples=(a_sample("gpu0", now, used_mb=0),)
    )
    decisions = await observer.on_reports([gone], now)
    commit(world, decisions)

    assert [lease.state for decision in decisions for lease in decision.leases] == [LeaseState.RELEASED]
    ledger = world.ledgers[key("gpu0")]
    assert ledger.sample is not None
    assert (ledger.sample.used_mb, ledger.free_mb()) == (0, 80 * GIB)


async def test_a_stack_is_asked_for_once_and_its_answer_is_an_object(tmp_path: Path) -> None:
    world = a_world(holding(a_task("runs", gpu_mb=GIB), "gpu0"))
    blobs, rules = DirectoryBlobs(tmp_path), InventoryRules("test", Mib(0))
    observer = Observer(world, Policy(), blobs, rules, 65536, {}, lambda: MonotonicSeconds(NOW))
    world.add_request(Request("r1", TaskId("runs"), "default", "stack", {"rank": 0}, NOW))
    [order] = [order for decision in observer.on_requests(NOW) for order in decision.orders]
    assert isinstance(order, StackOrder)
    assert observer.on_requests(Instant(NOW + 1.0)) == [], "it waits for the agent"

    told = Stacked(TaskId("runs"), Fence(1), NOW, "r1", "Thread 1", "")
    [decision] = await observer.on_reports([told], NOW)
    assert json.loads(await blobs.get(decision.answer)) == {"stack": "Thread 1", "message": "", "at": NOW}
    commit(world, decision)
    assert world.requests == {}
    assert await observer.on_reports([told], NOW) == [], "nobody asks any more"


async def test_a_stack_without_an_answer_is_given_up(tmp_path: Path) -> None:
    world = a_world(holding(a_task("runs", gpu_mb=GIB), "gpu0"))
    blobs, rules = DirectoryBlobs(tmp_path), InventoryRules("test", Mib(0))
    observer = Observer(world, Policy(), blobs, rules, 65536, {}, lambda: MonotonicSeconds(NOW))
    world.add_request(Request("r1", TaskId("runs"), "default", "stack", {"rank": 0}, NOW))
    observer.on_requests(NOW)
    [decision] = observer.on_requests(Instant(NOW + STACK_SECONDS + 1.0))
    assert (decision.requests_done, decision.answer) == (("r1",), "")


async def test_the_newest_sample_of_a_machine_is_in_the_world(tmp_path: Path) -> None:
    world, blobs = a_world(), DirectoryBlobs(tmp_path)
    rules = InventoryRules("test", Mib(0))
    observer = Observer(world, Policy(), blobs, rules, 65536, {}, lambda: MonotonicSeconds(NOW))
    first, second = (NodeSample(NodeName("n1"), Instant(NOW + n), 0.5, Mib(9), Mib(4)) for n in range(2))
    assert await observer.on_reports([first, second], NOW) == []
    assert world.node_samples == {"n1": second}
