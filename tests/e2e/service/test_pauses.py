"""A paused queue on real Ray: what runs goes on, what waits starts no more, also after a kill."""

from pathlib import Path

from gpubroker import Broker

from tests.e2e.service_process import ServiceProcess, until
from tests.patience import PATIENCE_SECONDS


def test_paused_tenant_starts_nothing_until_resumed_even_after_kill_9(
    service: ServiceProcess, tmp_path: Path
) -> None:
    witness, flag = tmp_path / "witness", tmp_path / "flag"
    guest = service.of("guest")
    work = {"witness": str(witness), "until": str(flag)}
    runs = guest.submit("tests.e2e.work:hold", kwargs=work, gpu_mb=20_000)
    until(lambda: witness.exists(), "it runs")
    assert service.broker.pause_queue(tenant="guest", reason="moving").paused is not None
    waits = guest.submit("tests.e2e.work:add", 2, 3, cpu=0.1)
    service.kill_9()
    service.start()

    guest = service.of("guest")
    free = service.broker.submit("tests.e2e.work:add", 1, 2, cpu=0.1)
    assert service.broker.result(free, timeout_seconds=PATIENCE_SECONDS) == 3
    assert_waits(guest, waits.id)
    flag.touch()
    assert guest.result(runs.id, timeout_seconds=PATIENCE_SECONDS) == 1
    assert_waits(guest, waits.id)

    service.broker.resume_queue(tenant="guest")
    assert guest.result(waits.id, timeout_seconds=PATIENCE_SECONDS) == 5
    phases = guest.get(runs.id).phases
    assert phases is not None
    assert phases.starting_seconds > 0.0


def test_a_paused_stream_starts_nothing_until_it_is_resumed(service: ServiceProcess) -> None:
    broker = service.broker
    broker.pause_queue(stream="nightly")
    waits = broker.submit("tests.e2e.work:add", 2, 3, cpu=0.1, stream="nightly")
    free = broker.submit("tests.e2e.work:add", 1, 2, cpu=0.1, stream="release")
    assert broker.result(free, timeout_seconds=PATIENCE_SECONDS) == 3
    assert_waits(broker, waits.id)
    broker.resume_queue(stream="nightly")
    assert broker.result(waits, timeout_seconds=PATIENCE_SECONDS) == 5
    again = waits.retry()
    assert again.retry_of == waits.id
    assert broker.result(again, timeout_seconds=PATIENCE_SECONDS) == 5


def assert_waits(guest: Broker, task: str) -> None:
    seen = guest.get(task)
    assert seen.pending is not None
    assert (seen.state, seen.pending.reason) == ("pending", "QueuePaused")
