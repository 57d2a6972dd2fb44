"""A machine with GPUs as NVIDIA's library tells it: the part of `pynvml` that the probe calls, scripted."""

from dataclasses import dataclass, field

MIB = 2**20


class NVMLError(Exception):
    """Base of all of the library's errors."""


class NVMLError_NotSupported(NVMLError):  # noqa: N801  # the library's name
    """This device cannot tell."""


class NVMLError_FunctionNotFound(NVMLError):  # noqa: N801  # the library's name
    """The driver is older than this question."""


class NVMLError_NotFound(NVMLError):  # noqa: N801  # the library's name
    """There is nothing in this slot."""


class NVMLError_GpuIsLost(NVMLError):  # noqa: N801  # the library's name
    """It fell off the bus."""


@dataclass
class Process:
    pid: int
    usedGpuMemory: int | None  # noqa: N815  # the library's name


@dataclass
class Memory:
    total: int
    used: int
    free: int


@dataclass
class MemoryV2(Memory):
    reserved: int


@dataclass
class Rates:
    gpu: int


@dataclass
class Gpu:
    uuid: str
    total_mb: int = 24_000
    used_mb: int = 0
    """By processes, seen or not."""
    reserved_mb: int = 0
    """By the driver, for itself."""
    compute: list[Process] = field(default_factory=list)
    graphics: list[Process] | None = field(default_factory=list)
    busy_percent: int | None = 0
    mig: bool | None = None
    instances: tuple["Gpu | None", ...] = ()
    """Of MIG, by slot; None is an empty one."""
    name: bytes = b"NVIDIA H100"
    lost: bool = False


def process(pid: int, mb: int | None) -> Process:
    return Process(pid, None if mb is None else mb * MIB)


class Machine:
    """Stands in for the module. None in a Gpu means that the device cannot tell."""

    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLError_NotSupported
    nvmlMemory_v2 = 0x02000028  # noqa: N815  # the library's name

    def __init__(self, *gpus: Gpu, is_old: bool = False) -> None:
        self.gpus = gpus
        self._is_old = is_old

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:  # noqa: N802
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:  # noqa: N802
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: Gpu) -> bytes:  # noqa: N802
        return gpu.name

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu, version: int | None = None) -> Memory:  # noqa: N802
        if gpu.lost:
            raise NVMLError_GpuIsLost
        total, used, reserved = gpu.total_mb * MIB, gpu.used_mb * MIB, gpu.reserved_mb * MIB
        free = total - used - reserved
        if version is None:
            return Memory(total, used + reserved, free)
        if self._is_old or version != self.nvmlMemory_v2:
            raise NVMLError_FunctionNotFound
        return MemoryV2(total, used, free, reserved)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: Gpu) -> list[Process]:  # noqa: N802
        return gpu.compute

    def nvmlDeviceGetGraphicsRunningProcesses(self, gpu: Gpu) -> list[Process]:  # noqa: N802
        if gpu.graphics is None:
            raise NVMLError_NotSupported
        return gpu.graphics

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> tuple[int, int]:  # noqa: N802
        if gpu.mig is None:
            raise NVMLError_NotSupported
        return int(gpu.mig), int(gpu.mig)

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: Gpu) -> int:  # noqa: N802
        return len(gpu.instances)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Gpu, slot: int) -> Gpu:  # noqa: N802
        instance = gpu.instances[slot]
        if instance is None:
            raise NVMLError_NotFound
        return instance

    def nvmlDeviceGetUtilizationRates(self, gpu: Gpu) -> Rates:  # noqa: N802
        if gpu.busy_percent is None:
            raise NVMLError_NotSupported
        return Rates(gpu.busy_percent)
