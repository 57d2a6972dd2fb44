"""Roles that share what one task is given, because only one of them is at work at a time."""

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field

from gpubroker_server.gateway.http.bodies import Body, LabelKey

ROLES_VARIABLE = "GPUBROKER_ROLES"
"""In the environment of the task's process: its roles by name, separated by commas."""


class Role(Body):
    """What one role needs. What is left out it does not need."""

    gpus: Annotated[int, Field(ge=0, le=1024)] | None = None
    gpu_mb: Annotated[int, Field(ge=1, le=16_777_216)] | None = None
    gpu_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    cpu: Annotated[float, Field(ge=0, le=100_000)] | None = None
    memory_mb: Annotated[int, Field(ge=0, le=1_073_741_824)] | None = None
    custom: Annotated[dict[LabelKey, Annotated[float, Field(gt=0, le=1e9)]], Field(max_length=32)] = Field(
        default_factory=dict
    )


SIZES = ("gpus", "gpu_mb", "gpu_fraction", "cpu", "memory_mb")


def most_of(roles: Iterable[Role]) -> dict[str, Any]:
    """The most that any role needs, field by field; None where none of them says anything.

    Whole GPUs are more than any size: if one role needs them, all get them.
    """
    roles = list(roles)
    stated = {size: [value for role in roles if (value := getattr(role, size)) is not None] for size in SIZES}
    custom: dict[str, float] = {}
    for role in roles:
        for name, amount in role.custom.items():
            custom[name] = max(amount, custom.get(name, 0.0))
    most = {size: max(values, default=None) for size, values in stated.items()}
    return {**most, "custom": custom, "exclusive": any(map(_takes_whole_gpus, roles))}


def _takes_whole_gpus(role: Role) -> bool:
    return bool(role.gpus) and role.gpu_mb is None and role.gpu_fraction is None
