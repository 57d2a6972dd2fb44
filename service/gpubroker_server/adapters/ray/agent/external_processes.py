"""Processes that others started and that hold a lease: measured and watched, never signalled."""

import os
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpubroker.runtime.messages import Report, RunKey

from gpubroker_server.adapters.ray.agent.run_records import Card, RunFiles
from gpubroker_server.adapters.ray.processes import (
    ProcessId,
    Watched,
    are_related,
    is_marked,
    lineage,
    process_id,
    process_table,
)
from gpubroker_server.adapters.ray.wire import WireSample

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
        instance: str,
        ray_node: str,
        runners: Callable[[], Iterable[int]],
        say: Callable[[Report], None],
        measure: Callable[[Sequence[str]], Coroutine[Any, Any, list[WireSample]]],
        do: Callable[[str, Callable[[], Coroutine[Any, Any, None]]], None],
    ) -> None:
        """`runners` are the processes that runs are in or will be. `do` carries something out in the
        background, over and over until it succeeds."""
        self._files = files
        self._instance = instance
        self._ray_node = ray_node
        self._runners = runners
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
        is gone, and one that is not an outsider's is told to be none."""
        if key in self._known:
            return
        outsider = Outsider(leases)
        try:
            process = process_id(pid)
            proof = "not_your_process" if self._is_taken(pid) else ""
        except ProcessLookupError:
            proof = "process_absent"
        self._known[key] = outsider
        if proof:
            self._note_end(key, outsider, proof)
        else:
            self._begin(outsider, Card(*key, leases, "", *process, self._ray_node))

    def adopt(self, card: Card) -> None:
        """Go on with what an earlier agent watched."""
        outsider = self._known[card.key] = Outsider(card.leases)
        self._begin(outsider, card)

    def forget(self, key: RunKey) -> None:
        outsider = self._known.pop(key, None)
        if outsider is not None:
            self._files.remove_card(key)
            if outsider.watched is not None:
                outsider.watched.close()

    def _is_taken(self, pid: int) -> bool:
        """Whether it is accounted for already, or would be accounted for with those who are: what it uses
        would be taken from another's account."""
        table = process_table()
        leased = (other.watched.id.pid for other in self._known.values() if other.watched is not None)
        # This process starts nothing but the threads it measures in: only what is above it is not for lease.
        return (
            is_marked(pid, self._instance)
            or pid in lineage(os.getpid(), table)
            or any(are_related(pid, other, table) for other in (*self._runners(), *leased))
        )

    def _begin(self, outsider: Outsider, card: Card) -> None:
        try:
            self._take_up(outsider, card)
        except OSError:  # the disk is full, or this process has too many files open

            async def again() -> None:
                if self._known.get(card.key) is outsider:
                    self._take_up(outsider, card)

            self._do(f"watching the process of {card.key}", again)

    def _take_up(self, outsider: Outsider, card: Card) -> None:
        """Raises OSError; then it is not watched."""
        self._files.write_card(card)
        try:
            outsider.watched = Watched(card.process, partial(self._note_end, card.key, outsider))
        except ProcessLookupError:
            self._note_end(card.key, outsider)

    def _note_end(self, key: RunKey, outsider: Outsider, proof: str = "process_absent") -> None:
        outsider.watched = None
        self._do(f"telling that the process of {key} is gone", partial(self._say_gone, key, outsider, proof))

    async def _say_gone(self, key: RunKey, outsider: Outsider, proof: str) -> None:
        """What it had is free: it is measured after its end."""
        samples = await self._measure([uuid for uuid, _mb in outsider.leases])
        if self._known.get(key) is outsider:
            outsider.gone = ("gone", *key, time.time(), proof, tuple(samples))
            self._say(outsider.gone)
            self._files.remove_card(key)
