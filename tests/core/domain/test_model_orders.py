"""Which orders to model servers may be carried out beside one another."""

import pytest
from gpubroker_server.core.domain.model_orders import CheckOrder, LoadOrder, UnloadOrder, is_in_the_way
from gpubroker_server.core.domain.units import DeviceKey, Fence, Mib, Seconds, TaskId
from msgspec.structs import replace

GPU0, GPU1 = ((DeviceKey("n1/gpu0"), Mib(10)),), ((DeviceKey("n1/gpu1"), Mib(10)),)
LOAD = LoadOrder(TaskId("t1"), Fence(1), "main", "llm", GPU0, sized=True)
OTHER = LoadOrder(TaskId("t2"), Fence(1), "main", "bert", GPU0, sized=True)
CHECK = CheckOrder(TaskId("t3"), Fence(1), "main", "resnet", GPU0, sized=True)
UNLOAD = UnloadOrder(TaskId("t4"), Fence(1), "main", "yolo", Seconds(0.0))


@pytest.mark.parametrize(
    ("one", "other", "waits"),
    [
        (LOAD, OTHER, False),
        (LOAD, CHECK, False),
        (LOAD, replace(OTHER, sized=False), True),
        (LOAD, replace(CHECK, sized=False), True),
        (LOAD, replace(OTHER, sized=False, devices=GPU1), False),
        (LOAD, replace(OTHER, sized=False, devices=()), False),
        (replace(LOAD, sized=False), UNLOAD, False),
        (LOAD, replace(UNLOAD, model="llm"), True),
        (LOAD, replace(UNLOAD, model="llm", server="second"), False),
        (LOAD, replace(UNLOAD, steps=("llm",)), True),
    ],
)
def test_orders_wait_for_one_another_for_a_model_or_for_a_measurement(
    one: LoadOrder, other: LoadOrder | CheckOrder | UnloadOrder, waits: bool
) -> None:
    assert is_in_the_way(one, other) is waits
    assert is_in_the_way(other, one) is waits
