"""Nobody waits for ever for an answer that does not come.

The server's limits end statements that take too long, and those of the connection end what has no other
side. Neither helps where something in between takes every byte and passes none on: who waits must give up.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from service.adapters.boot_clock import boot_seconds
from service.adapters.sql.session import Session

LOOK_SECONDS = 0.5


class Patience:
    """Looks after sessions, each used by a thread of its own, until `close`."""

    def __init__(self, sessions: Sequence[Callable[[], Session | None]]) -> None:
        """Each is asked for anew: a session may come and go."""
        self._sessions = sessions
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look, name="gpubroker-patience", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._closing.wait(LOOK_SECONDS):
            for current in self._sessions:
                session = current()
                if session is None or session.waits_since is None:
                    continue
                if boot_seconds() - session.waits_since > session.patience_seconds:
                    with suppress(OSError):
                        session.hang_up()
