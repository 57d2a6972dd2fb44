"""Tells a command that shows a live table when to ask again: when the event log says that there is news."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpubroker.errors import BrokerError, Refused

if TYPE_CHECKING:
    from gpubroker.broker import Broker
    from gpubroker.tasks.event_reading import EventOptions

_LATEST_SECONDS = 5.0
"""The time after which the command asks again although nothing was committed. Ages, progress and the use of
memory are no events, and neither are those of other tenants for most tokens."""
_SOONEST_SECONDS = 0.5
"""The shortest time between two questions, so that a busy service is not asked at each event."""
_POLL_SECONDS = 1.0
"""The time between two questions to a service that gives no stream."""


class Changes:
    """Follows the event log in a thread."""

    def __init__(self, broker: Broker, kinds: Sequence[str], *, tenant: str | None = None) -> None:
        self._broker = broker
        self._kinds = kinds
        self._tenant = tenant
        self._happened = threading.Event()
        self._is_streaming = True
        self._asked_at = time.monotonic()
        threading.Thread(target=self._follow, daemon=True).start()

    def wait(self) -> None:
        """Wait until it is time to ask again."""
        self._happened.wait(_LATEST_SECONDS if self._is_streaming else _POLL_SECONDS)
        time.sleep(max(0.0, self._asked_at + _SOONEST_SECONDS - time.monotonic()))
        self._happened.clear()
        self._asked_at = time.monotonic()

    def _follow(self) -> None:
        wanted: EventOptions = {"last": 0, "kind": self._kinds}
        if self._tenant is not None:
            wanted["tenant"] = self._tenant
        while True:
            try:
                for _ in self._broker.events(follow=True, **wanted):
                    self._happened.set()
            except Refused as refusal:
                if refusal.code != "events-gone":
                    break
                self._happened.set()
            except BrokerError:
                break
        self._is_streaming = False
