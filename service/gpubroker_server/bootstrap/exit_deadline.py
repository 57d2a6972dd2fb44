"""An end that comes, whatever a process still waits for."""

import os
import sys
import threading


class LastMoment:
    """Ends the process at once when its time is over. Nothing that was acknowledged is lost by that: a power
    cut does the same, and everything is made for one."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def begin(self) -> None:
        """Once; later calls change nothing."""
        if self._timer.ident is None:
            self._timer.start()

    def cancel(self) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        sys.stderr.write(
            f"gpubroker: not at its end {self._seconds:g} s after it was asked to stop, and ended as it is\n"
        )
        sys.stderr.flush()
        os._exit(1)
