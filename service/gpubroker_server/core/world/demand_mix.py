"""Which demands for devices are usual: what was submitted, the older the less it counts."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from gpubroker_server.core.domain.demand import Demand, Where
from gpubroker_server.core.domain.units import DeviceKey, Mib
from gpubroker_server.core.world.ledger import Book
from gpubroker_server.core.world.placement_scores import Alike, Worth, sorts_of

MOST_COUNTED = 10_000
"""With more submissions than this in it all counts are halved, so that what was usual once is forgotten."""

MOST_TOLD_APART = 1_000
"""With more different demands than this counts are halved as well: the rare ones go."""

FRESH_SHARE = 0.125
"""With so many new ones among those that are counted, planners are told anew."""


class Mix:
    """Depends on what was submitted, and in which order; on no clock, and on no end of a task."""

    def __init__(self, edition: Mapping[Demand, int] | None = None) -> None:
        self.edition: Mapping[Demand, int] = {} if edition is None else edition
        """What planners are told: how often each demand was submitted. It stays for a while, so that they
        need not begin anew with each submission."""
        self._counts: dict[Demand, int] = {}
        self._total = 0
        self._fresh = 0
        self._worths: dict[str, Worth | None] = {}
        """By policy; of this edition and these devices."""
        self._told: Mapping[Demand, int] = self.edition
        self._alike: Alike = {}
        self._inventory_version = -1

    def add(self, demand: Demand) -> None:
        """Count a submission. Those without devices teach nothing about devices; of a gang each rank does."""
        for rank in demand.bundles:
            self.add(rank)
        if not demand.gpus:
            return
        plain = _plain(demand)
        self._counts[plain] = self._counts.get(plain, 0) + 1
        self._total += 1
        self._fresh += 1
        if self._total > MOST_COUNTED or len(self._counts) > MOST_TOLD_APART:
            self._counts = {known: count // 2 for known, count in self._counts.items() if count > 1}
            self._total = sum(self._counts.values())
        if self._fresh >= FRESH_SHARE * self._total:
            self.edition = dict(self._counts)
            self._fresh = 0

    def worth(self, books: Mapping[DeviceKey, Book], version: int, policy: str) -> Worth | None:
        """What places on these devices are worth; None while nothing is known to be usual.

        The same one until the edition or the devices change. `version`: of the devices.
        """
        if policy not in ("stranded", "fgd"):
            return None
        if version != self._inventory_version:
            self._inventory_version = version
            alike = sorts_of(book.device for book in books.values())
            if alike != self._alike:
                self._alike = alike
                self._worths.clear()
        if self._told is not self.edition:
            self._told = self.edition
            self._worths.clear()
        if policy not in self._worths:
            found = Worth(self.edition, self._alike, policy)
            self._worths[policy] = found if found.usual else None
        return self._worths[policy]


@lru_cache(4096)
def _plain(demand: Demand) -> Demand:
    """What decides on which devices it fits, and the CPU it needs beside them."""
    where = demand.where
    kinds = Where(kinds=where.kinds, min_power=where.min_power, min_device_mb=where.min_device_mb)
    return replace(demand, memory_mb=Mib(0), custom=(), slots=(), pool="", placement="pack", where=kinds)
