"""A wall clock that a test sets ahead and back for the processes it starts; the machine's is left alone."""

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.compiler import compile_library
from tests.places import short_place

SOURCE = Path(__file__).with_name("wall_clock.c")
_AHEAD = struct.Struct("=q")


class WallClock:
    """Of each process that starts with `env`."""

    def __init__(self, folder: Path) -> None:
        library, shifted = folder / "wall_clock.so", folder / "ahead_seconds"
        compile_library(SOURCE, library)
        shifted.write_bytes(_AHEAD.pack(0))
        with shifted.open("r+b") as file:
            self._ahead = mmap.mmap(file.fileno(), _AHEAD.size)
        self.env = {"LD_PRELOAD": str(library), "SHIFTED_CLOCK": str(shifted)}

    def set(self, ahead_seconds: int) -> None:
        """Against the machine's clock; negative: behind it."""
        self._ahead[:] = _AHEAD.pack(ahead_seconds)


@contextmanager
def a_wall_clock() -> Iterator[WallClock]:
    with TemporaryDirectory(prefix="gpubroker-clock-", dir=short_place()) as name:
        folder = Path(name)
        folder.chmod(0o755)  # a database server runs as another user
        yield WallClock(folder)
