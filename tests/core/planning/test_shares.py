"""How much of its devices' memory the libraries of a run may allocate."""

from typing import Any

from gpubroker_server.core.domain.orders import StartOrder
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.planning.cycle import plan_cycle

from tests.builders import GIB, NOW, a_device, a_task, a_world


def shares(**demand: Any) -> list[tuple[tuple[int, float], ...]]:
    """What the libraries of a run may allocate of GPUs of 80 GiB whose contexts take 1 GiB, beside a reserve
    of 8 GiB on the second."""
    gpus = (a_device("gpu0", context_mb=GIB), a_device("gpu1", context_mb=GIB, reserve_mb=8 * GIB))
    plan = plan_cycle(a_world(*gpus, a_task("run", **demand)), Policy(), NOW, budget=10_000)
    return [order.shares for one in plan.decisions for order in one.orders if isinstance(order, StartOrder)]


def test_libraries_may_allocate_what_is_leased_without_the_context() -> None:
    assert shares(gpu_mb=20 * GIB) == [((20 * GIB, 0.25),)], "21 GiB are leased"
    assert shares(gpu_fraction=0.01) == [((1, 1 / (80 * GIB)),)], "a limit of 0 MiB would be none"
    assert shares(gpus=1) == [()]
    assert shares(gpus=2) == [((80 * GIB, 1.0), (71 * GIB, 71 / 80))]
    assert shares() == [()]
