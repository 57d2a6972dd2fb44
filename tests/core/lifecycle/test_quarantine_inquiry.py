"""Which nodes are asked again about what is in quarantine, and when."""

import pytest
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.holders import External
from gpubroker_server.core.domain.lease import HolderKind, LeaseState, Proof, release
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Fence, Mib, MonotonicSeconds, NodeName, Seconds
from gpubroker_server.core.lifecycle.quarantine import PROBE_SECONDS, QuarantineProbe
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import GIB, Part, a_device, a_lease, a_task, a_world, commit, holding


class Asked:
    """By one leader, with a clock that the test sets."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.seconds = 1000.0
        self._probe = QuarantineProbe()

    def after(self, seconds: float) -> list[NodeName]:
        self.seconds += seconds
        return self._probe.due(self.world, MonotonicSeconds(self.seconds))


def in_quarantine(id: str = "run", node: str = "n1") -> list[Part]:
    """An ended run on a node that answers; its process is not confirmed gone."""
    device = a_device(f"gpu-of-{node}", node)
    done = a_task(id, state=TaskState.SUCCEEDED, fence=Fence(1))
    return [device, done, a_lease(done, device.key, 8 * GIB, state=LeaseState.QUARANTINED)]


def give_back(world: World) -> None:
    [lease] = world.unconfirmed.quarantined["run"].values()
    commit(world, Decision("run", "gone", leases=(release(lease, Proof.PROCESS_ABSENT),)))


def note(world: World, node: str, *, ready: bool) -> None:
    row = world.nodes[NodeName(node)]
    commit(world, Decision(node, "seen", nodes=(replace(row, ready=ready, version=row.version + 1),)))


def test_no_node_is_asked_while_nothing_is_in_quarantine() -> None:
    asked = Asked(a_world(holding(a_task("run", gpu_mb=GIB), "gpu0")))
    assert [asked.after(PROBE_SECONDS) for _ in range(3)] == [[], [], []]


def test_node_with_quarantined_memory_is_asked_regularly_but_not_at_once() -> None:
    asked = Asked(a_world(*in_quarantine()))
    assert asked.after(0.0) == []
    assert asked.after(PROBE_SECONDS - 1.0) == []
    assert asked.after(1.0) == ["n1"]
    assert asked.after(PROBE_SECONDS - 1.0) == []
    assert asked.after(1.0) == ["n1"]


def test_each_node_is_asked_in_its_own_time() -> None:
    world = a_world(*in_quarantine("one", "n1"), *in_quarantine("two", "n2"), *in_quarantine("three", "n3"))
    asked = Asked(world)
    note(world, "n2", ready=False)
    asked.after(0.0)
    note(world, "n2", ready=True)
    asked.after(PROBE_SECONDS / 2)
    assert asked.after(PROBE_SECONDS / 2) == ["n1", "n3"]
    assert asked.after(PROBE_SECONDS / 2) == ["n2"]


def test_a_node_that_does_not_answer_is_not_asked() -> None:
    """It says what is left there by itself, as soon as an agent answers there."""
    world = a_world(*in_quarantine())
    asked = Asked(world)
    asked.after(0.0)
    note(world, "n1", ready=False)
    assert asked.after(PROBE_SECONDS) == []


def test_no_node_is_asked_about_released_leases() -> None:
    world = a_world(*in_quarantine())
    asked = Asked(world)
    asked.after(0.0)
    give_back(world)
    assert asked.after(PROBE_SECONDS) == []


@pytest.mark.parametrize(("pid", "whom"), [(None, []), (4711, ["n1"])])
def test_a_node_is_asked_about_external_holders_that_named_a_process(
    pid: int | None, whom: list[str]
) -> None:
    task = a_task("run", demand=Demand(gpus=1, gpu_mb=Mib(8 * GIB)), holder=External(Seconds(60.0), pid))
    held = holding(task, "gpu0", state=TaskState.EXPIRED)
    kept = replace(held.leases[0], holder_kind=HolderKind.EXTERNAL, state=LeaseState.QUARANTINED)
    asked = Asked(a_world(held.task, kept))
    asked.after(0.0)
    assert asked.after(PROBE_SECONDS) == whom
