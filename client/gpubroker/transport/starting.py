"""Finds out whether a service with this data directory is being started. While it starts, a service has a
locked file there."""

import time
from contextlib import suppress
from pathlib import Path


def starting_for_seconds(data_dir: Path) -> float | None:
    """Return for how long a service has been starting; None if none is, or if it cannot be known."""
    try:
        import fcntl
    except ImportError:  # not on this system, where no service runs either
        return None
    for path in data_dir.glob("starting-*.lock"):
        with suppress(OSError), path.open() as file:
            began_at = path.stat().st_mtime
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return max(0.0, time.time() - began_at)
    return None
