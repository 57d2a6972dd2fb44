"""The operator's defaults for fields that a submission leaves out, by model type and by profile."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from gpubroker.wire.bounds import Count, Priority
from gpubroker.wire.policy import Profile as ShownProfile
from gpubroker.wire.policy import TaskDefaults
from msgspec import Meta, field
from msgspec.structs import fields, replace

from gpubroker_server.core.domain.environment import Environment
from gpubroker_server.core.domain.policy import BAND_NAMES
from gpubroker_server.core.domain.setting_marks import ELSEWHERE

LEARNED = "learned"
GpuSize = int | Literal["learned"]
"""The MiB of each device, or `learned` for the memory that earlier runs used."""


class NamedDefaults(ShownProfile, frozen=True):
    """The defaults of a model type or a profile. A field that is None has the default of all tasks."""

    name: Annotated[str, ELSEWHERE] = ""
    gpus: Annotated[int | None, ELSEWHERE] = None
    max_concurrency: Annotated[int | None, ELSEWHERE] = None

    def over(self, other: "NamedDefaults") -> "NamedDefaults":
        """Return these defaults, completed by `other` for fields that are None. With 0 GPUs the size of a GPU
        is not taken from `other`."""
        if self.gpus == 0:
            other = replace(other, gpu_mb=None)
        own = {
            field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None
        }
        return replace(other, **own)


class Profile(NamedDefaults, frozen=True):
    """The defaults of a profile that submissions name."""

    gpus: Count | None = None
    max_concurrency: Annotated[int, Meta(ge=1)] | None = None

    def __post_init__(self) -> None:
        """Refuse a GPU size with 0 GPUs. Raises ValueError."""
        if self.gpus == 0 and self.gpu_mb is not None:
            raise ValueError(f"gpus is 0 and gpu_mb is {self.gpu_mb}; leave one of them out")


_NO_DEFAULTS = NamedDefaults()


class Defaults(TaskDefaults, frozen=True):
    """Values that a task gets for fields that its submission leaves out."""

    priority: Priority = BAND_NAMES["batch"]
    timeout_seconds: Annotated[float | None, ELSEWHERE] = None
    model_types: Annotated[Mapping[str, NamedDefaults], ELSEWHERE] = field(default_factory=dict)
    profiles: Annotated[Mapping[str, NamedDefaults], ELSEWHERE] = field(default_factory=dict)
    environments: Annotated[Mapping[str, Environment], ELSEWHERE] = field(default_factory=dict)
    """The operator's environments, by name."""

    def named(self, model_type: str, profile: str = "") -> NamedDefaults:
        """Return the defaults of the profile, completed by those of the model type."""
        usual = self.model_types.get(model_type, _NO_DEFAULTS) if model_type else _NO_DEFAULTS
        return self.profiles[profile].over(usual) if profile else usual


def first(*values: Any) -> Any:
    """Return the first value that is not None; None if all values are None."""
    return next((value for value in values if value is not None), None)
