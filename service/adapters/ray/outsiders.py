"""Processes that others started and that hold a lease: measured and watched, never signalled."""

import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpubroker.runtime.messages import Report, RunKey

from service.adapters.ray.cards import Card, RunFiles
from service.adapters.ray.processes import ProcessId, Watched, process_id
from service.adapters.ray.wire import WireSample

Leases = tuple[tuple[str, int], ...]
"""(device UUID, MiB)"""


@dataclass(slots=True, eq=False)
class Outsider:
    """Kept until its end is told and need not be told again."""

    leases: Leases
    watched: Watched | None = None
    """None if it is gone."""
    gone: Report | None = None


class Outsiders:
    """Those of one node. A card of each lets a later agent go on with that process, not with its number."""

    def __init__(
        self,
        files: RunFiles,
        ray_node: str,
        say: Callable[[Report], None],
        measure: Callable[[Sequence[str]], Coroutine[Any, Any, list[WireSample]]],
        do: Callable[[str, Callable[[], Coroutine[Any, Any, None]]], None],
    ) -> None:
        """`do` carries something out in the background, over and over until it succeeds."""
        self._files = files
        self._ray_node = ray_node
        self._say = say
        self._measure = measure
        self._do = do
        self._known: dict[RunKey, Outsider] = {}

    def __contains__(self, key: RunKey) -> bool:
        return key in self._known

    def __iter__(self) -> Iterator[RunKey]:
        return iter(self._known)

    def everything_told(self) -> Iterator[Report]:
        return (outsider.gone for outsider in self._known.values() if outsider.gone is not None)

    def processes(self) -> dict[str, tuple[ProcessId, dict[str, int]]]:
        """As `Meter.measure` takes them."""
        return {
            str(key): (outsider.watched.id, dict(outsider.leases))
            for key, outsider in self._known.items()
            if outsider.watched is not None
        }

    def watch(self, key: RunKey, pid: int, leases: Leases) -> None:
        """Asked again it changes nothing: a number may be another process's by now. One that is not there
        is gone."""
        if key in self._known:
            return
        outsider = self._known[key] = Outsider(leases)
        try:
            process = process_id(pid)
        except ProcessLookupError:
            self._note_end(key, outsider)
            return
        self._files.write_card(Card(*key, leases, "", *process, self._ray_node))
        self._begin(key, outsider, process)

    def adopt(self, card: Card) -> None:
        """Go on with what an earlier agent watched."""
        outsider = self._known[card.key] = Outsider(card.leases)
        self._begin(card.key, outsider, card.process)

    def forget(self, key: RunKey) -> None:
        outsider = self._known.pop(key, None)
        if outsider is not None:
            self._files.remove_card(key)
            if outsider.watched is not None:
                outsider.watched.close()

    def _begin(self, key: RunKey, outsider: Outsider, process: ProcessId) -> None:
        try:
            outsider.watched = Watched(process, partial(self._note_end, key, outsider))
        except ProcessLookupError:
            self._note_end(key, outsider)

    def _note_end(self, key: RunKey, outsider: Outsider) -> None:
        outsider.watched = None
        self._do(f"telling that the process of {key} is gone", partial(self._say_gone, key, outsider))

    async def _say_gone(self, key: RunKey, outsider: Outsider) -> None:
        """What it had is free: it is measured after its end."""
        samples = await self._measure([uuid for uuid, _mb in outsider.leases])
        if self._known.get(key) is outsider:
            outsider.gone = ("gone", *key, time.time(), "process_absent", tuple(samples))
            self._say(outsider.gone)
            self._files.remove_card(key)
