"""Where tests put their files: in memory, where there is enough of it.

Nobody needs them after a power cut, and half of the time of tests that write to SQLite went into waiting for
a disk. Whoever wants them elsewhere sets TMPDIR. The long runs of `make evidence` stay on the disk.
"""

import os
import shutil
import tempfile
from pathlib import Path

_MEMORY = Path("/dev/shm")
_ENOUGH_BYTES = 4 << 30
"""A container that nobody gave more has 64 MB there."""


def put_files_in_memory() -> None:
    """Those of this process and of all that it starts."""
    if "TMPDIR" not in os.environ and _has_room():
        os.environ["TMPDIR"] = str(_MEMORY)
        tempfile.tempdir = None


def _has_room() -> bool:
    return (
        _MEMORY.is_dir()
        and os.access(_MEMORY, os.W_OK)
        and not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC
        and shutil.disk_usage(_MEMORY).free >= _ENOUGH_BYTES
    )


def short_place() -> str:
    """For sockets, whose paths must stay short; on some systems the usual place has a long one."""
    return str(_MEMORY) if tempfile.gettempdir() == str(_MEMORY) else "/tmp"
