"""Objects that runs of this node use. An object is fetched once, and all runs read it from Ray's object
store.

Each time a run opens an object, the leader is asked whether the run may have it, and for the bytes that are
missing on this node, one part at a time. The contents of objects are not interpreted here.
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import structlog
from gpubroker.runtime.messages import Report, RunKey

log = structlog.get_logger("gpubroker.agent")

Failed = tuple[str, str]
"""The kind and the message of a failure."""
Answer = Callable[[RunKey, str, Any, Failed | None], None]
"""Gives a run the reference by which it reads an object, or the failure if the run gets none."""


class Kept(NamedTuple):
    shared: Any
    """The reference by which a run's process reads the object."""
    size_bytes: int


@dataclass(slots=True, eq=False)
class _Opening:
    """An object of a tenant for which runs wait. The leader is asked on behalf of the first run."""

    runs: list[RunKey]
    kept: Kept | None
    data: bytearray = field(default_factory=bytearray)
    waits: bool = False
    """True while the object waits until another object of several parts has arrived."""
    storing: "asyncio.Task[None] | None" = None

    @property
    def is_asked_for(self) -> bool:
        return self.storing is None and not self.waits

    @property
    def first_byte(self) -> int:
        """The position of the first byte that is missing on this node."""
        return len(self.data) if self.kept is None else self.kept.size_bytes


class SharedObjects:
    def __init__(
        self,
        cache_bytes: int,
        store: Callable[[str, str, bytearray], Any],
        report: Callable[[Report], None],
        give: Answer,
    ) -> None:
        """`cache_bytes` is the most bytes that are kept for later runs. `store` puts the bytes of a tenant's
        object where runs of the node can read them, and returns the reference; it may block, and raise any
        exception."""
        self._cache_bytes = cache_bytes
        self._store = store
        self._report = report
        self._give = give
        self._kept: OrderedDict[tuple[str, str], Kept] = OrderedDict()
        """The kept objects by tenant and id, the least recently used one first."""
        self._openings: dict[tuple[str, str], _Opening] = {}
        self._large: _Opening | None = None
        """The only object of several parts that is fetched now. Each object takes its size in the agent's
        memory, and twice that while it is stored, so they are fetched one after another."""

    def want(self, run: RunKey, tenant: str, id: str) -> None:
        """Note that the run waits for this object, and ask the leader for it. A repeated call changes
        nothing."""
        opening = self._openings.get((tenant, id))
        if opening is None:
            opening = _Opening([run], self._kept.get((tenant, id)))
            self._openings[tenant, id] = opening
            self._report(_question(opening, id))
        elif run not in opening.runs:
            opening.runs.append(run)

    def take(self, run: RunKey, id: str, size_bytes: int, first_byte: int, data: bytes, failure: str) -> None:
        """Take the leader's answer about an object."""
        matching = (
            opening for opening in self._openings.items() if opening[0][1] == id and run in opening[1].runs
        )
        (tenant, _), opening = next(matching, (("", id), None))
        if opening is None or first_byte != opening.first_byte or opening.storing is not None:
            return  # no run waits any longer, or the question was answered before
        if failure:
            self._kept.pop((tenant, id), None)
            self._finish(tenant, id, opening, ("object_missing", failure))
        elif opening.kept is not None:
            self._finish(tenant, id, opening)
        else:
            self._add(tenant, id, opening, size_bytes, data)

    def leave(self, run: RunKey) -> None:
        """Note that a run has ended and waits for no object any more."""
        for (tenant, id), opening in list(self._openings.items()):
            if run not in opening.runs:
                continue
            was_first = opening.runs[0] == run
            opening.runs.remove(run)
            if not opening.runs and opening.storing is None:
                del self._openings[tenant, id]
                self._gather_next(opening)
            elif was_first and opening.is_asked_for:
                self._report(_question(opening, id))

    def questions(self) -> Iterator[Report]:
        """Yield the questions that are not answered yet, for another leader."""
        for (_, id), opening in self._openings.items():
            if opening.is_asked_for:
                yield _question(opening, id)

    def _add(self, tenant: str, id: str, opening: _Opening, size_bytes: int, data: bytes) -> None:
        opening.data += data
        if len(opening.data) >= size_bytes:
            opening.storing = asyncio.create_task(self._keep(tenant, id, opening))
        elif not data:
            message = f"the bytes of object {id} are damaged: {len(opening.data)} of {size_bytes} are left"
            self._finish(tenant, id, opening, ("object_missing", f"{message}; upload it again"))
        elif self._large in (None, opening):
            self._large = opening
            self._report(_question(opening, id))
        else:
            opening.waits = True

    def _gather_next(self, over: _Opening) -> None:
        if self._large is not over:
            return
        waiting = ((id, opening) for (_, id), opening in self._openings.items() if opening.waits)
        id, self._large = next(waiting, ("", None))
        if self._large is not None:
            self._large.waits = False
            self._report(_question(self._large, id))

    async def _keep(self, tenant: str, id: str, opening: _Opening) -> None:
        try:
            digest, shared = await asyncio.to_thread(self._checked_and_stored, tenant, id, opening.data)
        except Exception as fault:
            log.exception("an object cannot be kept for the runs of this node")
            message = f"object {id} cannot be kept on this node: {fault}"
            self._finish(tenant, id, opening, ("object_unreadable", message))
            return
        if digest != id:
            message = f"the bytes of object {id} are damaged: they have the digest {digest}; upload it again"
            self._finish(tenant, id, opening, ("object_missing", message))
            return
        opening.kept = Kept(shared, len(opening.data))
        self._finish(tenant, id, opening)

    def _checked_and_stored(self, tenant: str, id: str, data: bytearray) -> tuple[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        return digest, self._store(tenant, id, data) if digest == id else None

    def _finish(self, tenant: str, id: str, opening: _Opening, failure: Failed | None = None) -> None:
        del self._openings[tenant, id]
        kept = opening.kept if failure is None else None
        if kept is not None:
            self._kept[tenant, id] = kept
            self._kept.move_to_end((tenant, id))
            self._drop_least_used()
        for run in opening.runs:
            self._give(run, id, None if kept is None else kept.shared, failure)
        self._gather_next(opening)

    def _drop_least_used(self) -> None:
        """Drop the least recently used objects beyond the size of the cache. Runs that read a dropped object
        still have a reference to it."""
        while self._kept and sum(kept.size_bytes for kept in self._kept.values()) > self._cache_bytes:
            self._kept.popitem(last=False)


def _question(opening: _Opening, id: str) -> Report:
    return ("wanted", *opening.runs[0], time.time(), id, opening.first_byte)
