"""Find out whether a service with this data directory is starting. While a service starts, it holds a lock on
a file there."""

import time
from contextlib import suppress
from pathlib import Path


def starting_for_seconds(data_dir: Path) -> float | None:
    """Return for how many seconds a service has been starting; None if none is starting, or if that is
    unknown."""
    try:
        import fcntl
    except ImportError:  # this system lacks fcntl, and no service runs on it either
        return None
    for path in data_dir.glob("starting-*.lock"):
        with suppress(OSError), path.open() as file:
            began_at = path.stat().st_mtime
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return max(0.0, time.time() - began_at)
    return None
