"""The file that exists in the data directory while a service starts.

The file is locked, so that the file of a killed process is recognized. `gpubroker.transport.starting` reads
it.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self


class StartingFile:
    """The file that says that this process is starting. It exists from the beginning of the `with` block
    until `started`, or until the end of the block."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / f"starting-{os.getpid()}.lock"
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        for other in self._path.parent.glob("starting-*.lock"):
            with suppress(OSError), other.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # raises if its process lives
                other.unlink()
        self._file = self._path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.started()

    def started(self) -> None:
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None
