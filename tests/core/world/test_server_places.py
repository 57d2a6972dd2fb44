"""Whether the node and the GPUs of a model server exist as the settings name them."""

from gpubroker_server.core.domain.models import ModelRules
from gpubroker_server.core.domain.server_rules import ServerRules
from gpubroker_server.core.world.server_places import gpus_of, place_fault
from gpubroker_server.core.world.world import World

from tests.builders import a_device, a_node, a_world


def test_a_server_without_named_gpus_may_use_all_of_its_node() -> None:
    world = a_world(a_device("gpu0"), a_device("gpu1"), a_device("gpu2", "n2"))
    rules = ServerRules("main", "n1")
    assert [ledger.device.uuid for ledger in gpus_of(world, rules)] == ["gpu0", "gpu1"]
    [named] = gpus_of(world, ServerRules("main", "n1", devices=("gpu1",)))
    assert named.device.uuid == "gpu1"


def test_a_node_that_has_not_joined_is_said_with_those_that_have() -> None:
    assert place_fault(a_world(), ServerRules("main", "n9")) == (
        'its node "n9" has not joined the cluster; there are n1'
    )
    assert place_fault(World(), ServerRules("main", "n9")).endswith("there are no nodes yet")
    crowd = a_world(*(a_node(f"n{at}") for at in range(10)))
    assert place_fault(crowd, ServerRules("main", "q")).endswith("n7, 2 more")


def test_a_gpu_that_the_node_lacks_is_said() -> None:
    fault = place_fault(a_world(), ServerRules("main", "n1", devices=("gpu7",)))
    assert fault == "its node n1 has no GPU gpu7; there are gpu0"


def test_several_gpus_that_nobody_names_are_a_fault_unless_all_are_used() -> None:
    world = a_world(a_device("gpu0"), a_device("gpu1"))
    assert place_fault(world, ServerRules("main", "n1", devices=("gpu0",))) == ""
    assert place_fault(world, ServerRules("main", "n1", tells_gpus=True)) == ""
    assert place_fault(world, ServerRules("main", "n1", models={"m": ModelRules(gpus=2)})) == ""
    assert "2" in place_fault(world, ServerRules("main", "n1"))
