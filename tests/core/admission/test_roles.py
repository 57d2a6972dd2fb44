"""What roles need that take turns in one process."""

from collections.abc import Mapping
from typing import Any

from gpubroker_server.core.admission.roles import max_of_roles
from msgspec import Struct


class Role(Struct, frozen=True):
    gpus: int | None = None
    gpu_mb: int | None = None
    gpu_fraction: float | None = None
    cpu: float | None = None
    memory_mb: int | None = None
    custom: Mapping[str, float] = {}


def asked(*roles: Role) -> dict[str, Any]:
    return {name: value for name, value in max_of_roles(roles).items() if value}


def test_of_each_size_the_largest_counts() -> None:
    roles = Role(gpu_mb=5, cpu=1.0, custom={"seat": 1.0}), Role(gpu_mb=9, memory_mb=4, custom={"seat": 2.0})
    assert asked(*roles) == {"gpu_mb": 9, "cpu": 1.0, "memory_mb": 4, "custom": {"seat": 2.0}}
    assert asked() == {}


def test_whole_gpus_of_one_role_are_more_than_any_size_of_others() -> None:
    assert asked(Role(gpus=1), Role(gpu_mb=9)) == {"gpus": 1, "gpu_mb": 9, "exclusive": True}
    assert asked(Role(gpus=1, gpu_fraction=0.5)) == {"gpus": 1, "gpu_fraction": 0.5}
    assert asked(Role(gpus=0)) == {}
