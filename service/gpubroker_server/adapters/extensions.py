"""Runs extensions, each in a thread of its own behind a bounded queue, so that none holds up the
service."""

import contextlib
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Final

import structlog

from gpubroker_server.core.world.events import Event
from gpubroker_server.ports.extension import ENTRY_POINTS, Extension

log = structlog.get_logger("gpubroker.extensions")

MAX_QUEUED: Final = 10_000
"""The most events that wait for one extension. Further ones are dropped and counted."""
START_SECONDS: Final = 30.0
STOP_SECONDS: Final = 5.0
WARN_SECONDS: Final = 60.0
"""The least time between two lines in the log about dropped events or faults of one extension."""


class ExtensionRefused(Exception):
    """An extension of the settings cannot be started. The message says why and what to do."""


def installed(name: str) -> Extension:
    """Return a new extension of this name. Raises ExtensionRefused if there is none, or if it cannot be
    loaded."""
    points = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in points:
        known = ", ".join(sorted(points)) or "none"
        raise ExtensionRefused(
            f'no installed package has an extension "{name}" (entry points of {ENTRY_POINTS}: {known}); '
            "install the package that has it, or remove it from extensions"
        )
    try:
        extension: Extension = points[name].load()()
    except Exception as fault:
        raise ExtensionRefused(
            f'extension "{name}" ({points[name].value}) cannot be loaded: {fault!r}'
        ) from fault
    return extension


class RunningExtension:
    """An extension with its thread and its queue."""

    def __init__(self, name: str, extension: Extension) -> None:
        self.name = name
        self.delivered = self.failed = self.dropped = 0
        """Events that `on_event` took, that it failed on, and that found the queue full."""
        self._extension = extension
        self._queue: queue.Queue[Event | None] = queue.Queue(MAX_QUEUED)
        self._thread = threading.Thread(target=self._work, name=f"extension {name}", daemon=True)
        self._options: Mapping[str, Any] = {}
        self._started = threading.Event()
        self._start_fault: Exception | None = None
        self._warned_at = float("-inf")

    def start(self, options: Mapping[str, Any]) -> None:
        """Start the extension, and wait until it has begun. Raises ExtensionRefused."""
        self._options = options
        self._thread.start()
        if not self._started.wait(START_SECONDS):
            raise ExtensionRefused(f'extension "{self.name}" has not started within {START_SECONDS:g} s')
        if self._start_fault is not None:
            raise ExtensionRefused(
                f'extension "{self.name}" cannot start: {self._start_fault!r}; see its options under '
                f"extensions.{self.name}"
            ) from self._start_fault

    def offer(self, events: Sequence[Event]) -> None:
        """Queue the events. Never waits."""
        for event in events:
            try:
                self._queue.put_nowait(event)
            except queue.Full:
                self.dropped += 1
        if self.dropped and self._may_warn():
            fault = f"{self.dropped} events were dropped since the start"
            log.warning("an extension is too slow", extension=self.name, fault=fault)

    def stop(self) -> None:
        """Have the extension end after the events that it has. Waits at most twice STOP_SECONDS."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=STOP_SECONDS)
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            log.warning("an extension did not end in time and is left behind", extension=self.name)

    def _work(self) -> None:
        try:
            self._extension.start(self._options)
        except Exception as fault:
            self._start_fault = fault
        self._started.set()
        if self._start_fault is not None:
            return
        while (event := self._queue.get()) is not None:
            try:
                self._extension.on_event(_shown(event))
                self.delivered += 1
            except Exception:
                self.failed += 1
                if self._may_warn():
                    log.exception("an extension failed on an event", extension=self.name)
        try:
            self._extension.stop()
        except Exception:
            log.exception("an extension failed while it ended", extension=self.name)

    def _may_warn(self) -> bool:
        now = time.monotonic()
        if now - self._warned_at < WARN_SECONDS:
            return False
        self._warned_at = now
        return True


def _shown(event: Event) -> Mapping[str, Any]:
    return {
        "position": event.position,
        "at": event.at,
        "kind": event.kind,
        "key": event.key,
        "tenant": event.tenant,
        "fields": dict(event.fields),
    }
