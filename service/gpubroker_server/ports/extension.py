"""The door for programs of others that are told what happens: extensions, which run inside the broker."""

from collections.abc import Mapping
from typing import Any, Protocol

ENTRY_POINTS = "gpubroker.extensions"
"""The group of entry points. An entry point names a callable without arguments that returns an Extension."""


class Extension(Protocol):
    """A program that reacts to events. All methods are called in one thread of its own, one after the
    other."""

    def start(self, options: Mapping[str, Any]) -> None:
        """Begin. `options` are those of the setting `extensions.NAME`. An exception ends the start of the
        service."""

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Take an event of the log: `position`, `at` (seconds since 1970), `kind`, `key`, `tenant` and
        `fields`, as `GET /events` has them. An exception is logged and counted, and the next event comes."""

    def stop(self) -> None:
        """End. The thread is left behind if this takes longer than a few seconds."""
