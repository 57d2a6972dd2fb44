"""Memory of what the service does not start, on real Ray: measured as its holder's, asked back, and freed."""

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from gpubroker import Broker, LeaseState
from gpubroker.wire.devices import Holder

from tests.e2e.service_process import ServiceProcess, until
from tests.patience import PATIENCE_SECONDS

USED_MB = 9000


@pytest.fixture
def outsider() -> Iterator["subprocess.Popen[bytes]"]:
    """A process of nobody's, which says that it uses so much of each of its devices."""
    process = subprocess.Popen(["sleep", "600"], env=os.environ | {"SIMULATED_GPU_MB": str(USED_MB)})
    yield process
    process.kill()
    process.wait()


def holder_of(broker: Broker, lease: str) -> Holder | None:
    holders = [holder for gpu in broker.gpus() for holder in gpu.holders]
    return next((holder for holder in holders if holder.id == lease), None)


def test_what_its_process_uses_is_the_leases_and_its_end_frees_the_memory(
    service: ServiceProcess, broker: Broker, outsider: "subprocess.Popen[bytes]"
) -> None:
    lease = broker.ask_lease(holder="a server", gpu_mb=16_000, pid=outsider.pid, ttl_seconds=600)
    until(lambda: broker.get_lease(lease).state is LeaseState.HELD, "the lease is held")

    def measured_mb() -> int | None:
        holder = holder_of(broker, lease.id)
        return None if holder is None else holder.measured_mb

    until(lambda: measured_mb() == USED_MB, "its process is measured as its own")
    # Once, and only where its lease is. Simulated devices have no foreign memory, whatever happens.
    assert [(gpu.used_mb, gpu.unaccounted_mb) for gpu in broker.gpus()] == [(USED_MB, 0), (0, 0)]
    service.kill_9()
    service.start()
    broker = service.broker
    until(lambda: measured_mb() == USED_MB, "it is watched under the next leader, too")
    assert broker.get_lease(lease).state is LeaseState.HELD
    outsider.send_signal(signal.SIGKILL)
    outsider.wait()
    until(lambda: broker.get_lease(lease).state is LeaseState.ENDED, "it ended with its process")
    ended = broker.get_lease(lease)
    assert ended.error is not None
    assert ended.error.kind == "process_gone"
    assert all(gpu.leased_mb == 0 for gpu in broker.gpus())


def test_a_holder_gives_way_to_a_task_of_higher_priority(service: ServiceProcess) -> None:
    broker = service.broker
    with broker.lease(gpus=2, priority="idle", grace_seconds=20, holder="a notebook") as lease:
        assert len(lease.device_uuids) == 2
        urgent = broker.submit("tests.e2e.work:add", 20, 22, gpu_mb=20_000, priority="critical")
        assert lease.wait_for_notice(30)
        assert lease.notice is not None
        assert lease.notice.reason == "preempt"
        assert broker.get(urgent).state == "pending"
    assert broker.result(urgent, timeout_seconds=PATIENCE_SECONDS) == 42


def test_external_process_that_stays_keeps_its_memory_until_it_is_gone(
    service: ServiceProcess, outsider: "subprocess.Popen[bytes]"
) -> None:
    broker = service.broker
    lease = broker.ask_lease(gpus=1, pid=outsider.pid, ttl_seconds=1, grace_seconds=0)
    until(lambda: broker.get_lease(lease).state is LeaseState.QUARANTINED, "it was not renewed nor released")
    assert holder_of(broker, lease.id) is not None
    assert outsider.poll() is None
    outsider.kill()
    outsider.wait()
    until(lambda: broker.get_lease(lease).state is LeaseState.ENDED, "its process is known to be gone")
    until(lambda: all(gpu.leased_mb == 0 for gpu in broker.gpus()), "its memory is free")
