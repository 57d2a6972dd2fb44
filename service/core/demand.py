"""What a task asks for."""

from dataclasses import dataclass

from service.core.units import Mib


@dataclass(frozen=True, slots=True)
class Demand:
    """What a task asks for. Sizes are per device; `cpu` and `memory_mb` are of the one node it runs on.

    `gpus` devices of `gpu_mb` MiB each; with neither `gpu_mb` nor `gpu_fraction`, whole devices.
    `custom` is sorted by name, so that equal demands compare and hash equal.
    """

    gpus: int = 0
    gpu_mb: Mib | None = None
    gpu_fraction: float | None = None
    exclusive: bool = False
    cpu: float = 0.0
    memory_mb: Mib = Mib(0)
    custom: tuple[tuple[str, float], ...] = ()
    placement: str = "pack"

    @property
    def takes_whole_devices(self) -> bool:
        return self.gpus > 0 and (self.exclusive or (self.gpu_mb is None and self.gpu_fraction is None))
