"""Who was refused is asked again only if a node has grown enough for him."""

from gpubroker_server.core.domain.demand import Where
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Mib, NodeName
from gpubroker_server.core.planning.draft import Draft
from gpubroker_server.core.planning.node_room import Outlooks
from gpubroker_server.core.planning.refused import Refusal, Refused, Since
from gpubroker_server.core.world.queue import Kin

from tests.builders import GIB, NOW, a_device, a_node, a_task, a_world, holding


def refuse(refused: Refused, task: Task, *, stops: bool = False) -> Kin:
    kin = next((kin for kin in refused.shut if kin.demand == task.demand), Kin(task.demand))
    refusal = Refusal(task, task.priority, Since(1, 1))
    refused.put(kin, refusal)
    refused.join(kin, refusal, refused.lot(task.priority, stops=stops, now=Since(1, 1)))
    return kin


def met(refused: Refused, *parts: object) -> list[Kin]:
    room = Outlooks(Draft(a_world(*parts)), Policy(), NOW, NOW, {}).now(NodeName("n1"), 50)
    return [kin for kin, _ in refused.lot(50, stops=False, now=Since(0, 0)).met_by(room)]


def test_only_who_has_enough_of_everything_is_asked_again():
    refused = Refused()
    for mb in (10, 90):
        refuse(refused, a_task(f"{mb}", gpu_mb=mb * GIB))
    refuse(refused, a_task("cpu", cpu=1e6))
    refuse(refused, a_task("memory", memory_mb=2**40))
    refuse(refused, a_task("two", gpus=2, gpu_mb=GIB))
    refuse(refused, a_task("kind", gpu_mb=GIB, where=Where(kinds=("none",))))
    part = refuse(refused, a_task("part", gpu_fraction=0.5))
    whole = refuse(refused, a_task("whole", gpus=1))
    small = next(kin for kin in refused.shut if kin.demand.gpu_mb == 10 * GIB)
    assert met(refused, a_device()) == [small, part, whole]
    assert met(refused, a_device(), holding(a_task("run", gpu_mb=50 * GIB), "gpu0")) == [small]
    assert met(refused, a_node(max_runs=0), a_device()) == []


def test_devices_that_differ_are_looked_at_one_by_one():
    refused = Refused()
    large = refuse(refused, a_task("large", gpu_mb=60 * GIB))
    half = refuse(refused, a_task("half", gpu_fraction=0.5))
    full = holding(a_task("run", gpu_mb=70 * GIB), "gpu0")
    assert met(refused, a_device(), full, a_device("gpu1", mb=Mib(40 * GIB))) == [half]
    assert met(refused, a_device(), full, a_device("gpu1", mb=Mib(64 * GIB))) == [large, half]


def test_a_refusal_covers_lower_priorities_until_it_is_taken_out():
    refused = Refused()
    kin = refuse(refused, a_task("low", priority=20, gpu_mb=GIB), stops=True)
    assert refused.shut[kin] == 20
    assert refuse(refused, a_task("high", priority=80, gpu_mb=GIB)) is kin
    assert refused.shut[kin] == 80
    assert list(refused.of(kin)) == [80]
    high = refused.of(kin)[80]
    refuse(refused, a_task("low", priority=20, gpu_mb=GIB))
    refused.leave(kin, high, refused.lot(80, stops=False, now=Since(0, 0)))
    assert refused.shut[kin] == 20
    refused.put(kin, Refusal(a_task("low", gpu_mb=GIB), 20, Since(2, 2), NodeName("n1")))
    assert kin not in refused.shut
