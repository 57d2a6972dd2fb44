"""What `doctor` says of GPUs that are closed, on which runs fail, or that are gone."""

from gpubroker_server.core.control.findings.finding import Severity
from gpubroker_server.core.control.findings.gpus import closed_gpus, failing_gpus
from gpubroker_server.core.control.findings.nodes import missing_gpus
from gpubroker_server.core.domain.device import Closure
from gpubroker_server.core.domain.gpu_faults import FailingGpu
from gpubroker_server.core.lifecycle import gpu_closures
from msgspec.structs import replace

from tests.builders import NOW, a_device, a_world, commit, key

BROKEN = Closure("xid", "79", "XID 79: it has fallen off the bus", NOW)


def test_closed_gpu_is_critical_unless_an_operator_closed_it() -> None:
    world = a_world(
        a_device("gpu0", closure=BROKEN),
        a_device("gpu1", index=1, closure=Closure("operator", "", "closed by olga", NOW, "olga")),
        a_device("gpu2", index=2, closure=replace(BROKEN, is_waived=True)),
        a_device("gpu3", index=3),
    )
    found = {finding.subject: finding for finding in closed_gpus(world)}
    broken, closed = (world.ledgers[key(uuid)].device.label for uuid in ("gpu0", "gpu1"))
    assert found.keys() == {broken, closed}
    assert (found[broken].severity, found[closed].severity) == (Severity.CRITICAL, Severity.NOTE)
    assert "nvidia-smi -r" in found[broken].remedy
    assert found[closed].remedy == f"gpubroker reopen-gpu {closed}"
    assert found[closed].evidence == {"cause": "operator"}


def test_gpu_on_which_runs_fail_is_found_while_it_is_open() -> None:
    world = a_world(a_device("gpu0"), a_device("gpu1", index=1, closure=BROKEN))
    failing = [FailingGpu(key(uuid), 5, ("train",), NOW, NOW) for uuid in ("gpu0", "gpu1", "gone")]
    [finding] = failing_gpus(world, failing)
    assert finding.subject == world.ledgers[key("gpu0")].device.label
    assert "5 runs in a row failed at once" in finding.cause


def test_gpu_on_which_runs_fail_is_closed_once() -> None:
    world = a_world(a_device("gpu0"), a_device("gpu1", index=1, closure=BROKEN))
    failing = [FailingGpu(key(uuid), 5, ("train",), NOW, NOW) for uuid in ("gpu0", "gpu1", "gone")]
    [decision] = gpu_closures.by_failures(world, failing, NOW)
    commit(world, [decision])
    closure = world.ledgers[key("gpu0")].device.closure
    assert closure is not None
    assert closure.reason == "5 runs in a row failed at once here: train"
    assert list(gpu_closures.by_failures(world, failing, NOW)) == []


def test_gpus_are_missing_only_if_the_machine_shows_none() -> None:
    world = a_world(a_device("gpu0", simulated=False))
    shown = missing_gpus(world, "n1", {"gpu_absence": "the driver is not loaded"})
    assert [device.uuid for device in shown] == ["gpu0"]
    assert missing_gpus(world, "n1", {}) == []
