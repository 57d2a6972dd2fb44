"""A machine with GPUs as the real `pynvml` sees it: its library is `nvml.c`; a test says what is there."""

import ctypes
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pynvml

from tests.compiler import compile_library

SOURCE = Path(__file__).with_name("nvml.c")
LIBRARY = "libnvidia-ml.so.1"
"""The name under which `pynvml` asks the system for it. Another process finds it by LD_LIBRARY_PATH."""

ANY_CALL = "*"


@dataclass
class Process:
    pid: int
    mb: int | None
    """None: the driver cannot tell."""


@dataclass
class Gpu:
    """Or an instance of one. None means that the device cannot tell."""

    uuid: str
    total_mb: int = 24_000
    used_mb: int = 0
    """By processes, seen or not."""
    reserved_mb: int = 0
    """By the driver, for itself."""
    compute: list[Process] = field(default_factory=list)
    graphics: list[Process] = field(default_factory=list)
    busy_percent: int | None = 0
    mig: bool | None = None
    instances: tuple["Gpu | None", ...] = ()
    """Of MIG, by slot; None is an empty one."""
    name: str = "NVIDIA H100"
    health: tuple[int, int, int, int, int] | None = None
    """Milliwatts, degrees Celsius, MHz of SM and memory, ECC errors. Without it there are no XIDs either."""
    xids: list[int] = field(default_factory=list)
    remap_pending: bool | None = None
    recovery: int | None = None
    """The action that the driver asks for (NVML_GPU_RECOVERY_ACTION_*)."""
    errors: dict[str, int] = field(default_factory=dict)
    """What calls answer, by their names in the library or ANY_CALL."""
    hanging: str = ""
    """The call that does not come back while this is said."""

    def records(self) -> Iterator[tuple[object, ...]]:
        about = (
            self.uuid,
            self.name,
            self.total_mb,
            self.used_mb,
            self.reserved_mb,
            _or_dash(self.busy_percent),
        )
        yield "gpu", *about, _or_dash(None if self.mig is None else int(self.mig))
        yield from self._more()
        for slot, instance in enumerate(self.instances):
            if instance is not None:
                it = instance
                sizes = it.total_mb, it.used_mb, it.reserved_mb
                yield "instance", it.uuid, it.name, *sizes, _or_dash(it.busy_percent), self.uuid, slot
                yield from it._more()

    def _more(self) -> Iterator[tuple[object, ...]]:
        for kind, processes in (("compute", self.compute), ("graphics", self.graphics)):
            for process in processes:
                yield "process", self.uuid, kind, process.pid, _or_dash(process.mb)
        if self.health is not None:
            yield "health", self.uuid, *self.health
        if self.remap_pending is not None:
            yield "remap", self.uuid, int(self.remap_pending)
        if self.recovery is not None:
            yield "recovery", self.uuid, self.recovery
        for xid in self.xids:
            yield "xid", self.uuid, xid
        for call, code in self.errors.items():
            yield "fail", self.uuid, call, code
        if self.hanging:
            yield "hang", self.uuid, self.hanging


class Machine:
    """What a library in `folder` tells. `apply` makes changes of `gpus` known."""

    def __init__(self, folder: Path, *gpus: Gpu, init: int = 0, init_hangs: bool = False) -> None:
        self.folder = folder
        self.gpus = list(gpus)
        self.init = init
        """What the library's start answers."""
        self.init_hangs = init_hangs
        self.apply()

    def apply(self) -> None:
        hanging = [("hang", "driver", ANY_CALL)] if self.init_hangs else []
        records = [("init", self.init), *hanging, *(record for gpu in self.gpus for record in gpu.records())]
        draft = self.folder / "machine.new"
        draft.write_text("".join("\t".join(map(str, record)) + "\n" for record in records))
        draft.replace(self.folder / "machine")

    def lose(self, gpu: Gpu, code: int = pynvml.NVML_ERROR_GPU_IS_LOST) -> None:
        """Every call about it fails from now on."""
        gpu.errors = {ANY_CALL: code}
        self.apply()

    def hang(self, gpu: Gpu, call: str = ANY_CALL) -> None:
        gpu.hanging = call
        self.apply()

    def mend(self, gpu: Gpu) -> None:
        gpu.errors, gpu.hanging = {}, ""
        self.apply()

    def is_hanging(self, gpu: Gpu) -> bool:
        """A call waits."""
        return (self.folder / f"hangs-{gpu.uuid}").exists()


def build(folder: Path) -> None:
    """The library, compiled into this folder. Raises CalledProcessError with what the compiler said."""
    compile_library(SOURCE, folder / LIBRARY, f"-Wl,-soname,{LIBRARY}")


@contextmanager
def a_library() -> Iterator[Path]:
    """The folder of one; a process that starts with it first in LD_LIBRARY_PATH has this machine's GPUs."""
    folder = Path(tempfile.mkdtemp(prefix="gpb-nvml-"))
    try:
        build(folder)
        yield folder
    finally:
        shutil.rmtree(folder)


def load(folder: Path) -> None:
    """For this process, which has started: what is loaded is found by its name."""
    ctypes.CDLL(str(folder / LIBRARY))


def forget_start() -> None:
    """The next start of the library looks at the machine again."""
    try:
        while True:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        pass


def _or_dash(value: int | None) -> object:
    return "-" if value is None else value
