"""Compute the demand of a process whose roles take turns, such as training and generating."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

_SIZES = ("gpus", "gpu_mb", "gpu_fraction", "cpu", "memory_mb")


class RoleSizes(Protocol):
    """The resources that one role needs. A resource that the role does not need is None."""

    @property
    def gpus(self) -> int | None: ...
    @property
    def gpu_mb(self) -> int | None: ...
    @property
    def gpu_fraction(self) -> float | None: ...
    @property
    def cpu(self) -> float | None: ...
    @property
    def memory_mb(self) -> int | None: ...
    @property
    def custom(self) -> Mapping[str, float]: ...


def max_of_roles(roles: Iterable[RoleSizes]) -> dict[str, Any]:
    """Return the maximum over the roles, field by field; None for a field that no role states.

    If one role needs whole GPUs, the task gets whole GPUs, because they are larger than any stated size.
    """
    roles = list(roles)
    stated = {
        size: [value for role in roles if (value := getattr(role, size)) is not None] for size in _SIZES
    }
    custom: dict[str, float] = {}
    for name, amount in (pair for role in roles for pair in role.custom.items()):
        custom[name] = max(amount, custom.get(name, 0.0))
    exclusive = any(role.gpus and role.gpu_mb is None and role.gpu_fraction is None for role in roles)
    largest = {size: max(values, default=None) for size, values in stated.items()}
    return {**largest, "custom": custom, "exclusive": exclusive}
