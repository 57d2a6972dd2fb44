"""What the leader takes from reports besides decisions."""

from pathlib import Path

from gpubroker_server.adapters.blobs.directory import DirectoryBlobs
from gpubroker_server.broker.observe import Observer
from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.orders import Gone
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Fence, Instant, Mib, MonotonicSeconds, TaskId
from gpubroker_server.core.lifecycle.reconcile import InventoryRules

from tests.builders import GIB, NOW, a_device, a_sample, a_task, a_world, commit, holding, key


async def test_a_release_comes_with_the_sample_taken_after_the_process_was_gone(tmp_path: Path) -> None:
    task = a_task("ends", gpu_mb=60 * GIB)
    before = a_sample("gpu0", used_mb=60 * GIB, by_holder={"ends:1": 60 * GIB})
    world = a_world(a_device("gpu0"), holding(task, "gpu0"), before)
    blobs, rules = DirectoryBlobs(tmp_path), InventoryRules("test", Mib(0))
    observer = Observer(world, Policy(), blobs, rules, 65536, {}, lambda: MonotonicSeconds(NOW))
    now = Instant(NOW + 1.0)

    gone = Gone(TaskId("ends"), Fence(1), now, "process_absent", samples=(a_sample("gpu0", now, used_mb=0),))
    decisions = await observer.on_reports([gone], now)
    commit(world, decisions)

    assert [lease.state for decision in decisions for lease in decision.leases] == [LeaseState.RELEASED]
    ledger = world.ledgers[key("gpu0")]
    assert ledger.sample is not None
    assert (ledger.sample.used_mb, ledger.free_mb()) == (0, 80 * GIB)
