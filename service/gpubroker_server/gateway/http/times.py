"""Times in answers: RFC 3339 in UTC, and how old the World is that an overview shows."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Protocol

from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.http.bodies import RequestLimits
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.http.waiters import Waiters
from gpubroker_server.ports.executor import Progress
from gpubroker_server.ports.store import (
    Clock,
    TaskStore,
)

Time = Annotated[str, Field(json_schema_extra={"format": "date-time"}, examples=["2026-11-21T10:02:11.412Z"])]
"""RFC 3339 in UTC, with Z."""


def rfc3339(at: Instant) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def rfc3339_or_none(at: Instant | None) -> str | None:
    return None if at is None else rfc3339(at)


class AsOf(TypedDict):
    as_of: Annotated[Time, Field(description="When the newest event in this overview was committed.")]
    age_seconds: Annotated[float, Field(description="Since the overview was last known to be current.")]
    position: Annotated[int, Field(description="Log position of the newest event in this overview.")]


class Follower(Protocol):
    """The World of this process, which follows the event log on the gateway's event loop."""

    @property
    def world(self) -> World:
        """Routes only read it."""

    @property
    def clock(self) -> Clock: ...

    @property
    def progress(self) -> Mapping[TaskId, Progress]:
        """The latest progress report of each run."""

    def age_seconds(self) -> float:
        """Seconds since the World was last known to be at the head of the log."""

    @property
    def is_clock_contradicted(self) -> bool:
        """Whether the database's clock does not count."""

    def why_stale(self) -> str:
        """What to do if waiting will not make the World current; empty otherwise."""


class Freshness:
    """Refuses an overview that is too old, and waits until the World has heard of recent commits."""

    def __init__(self, follower: Follower, store: TaskStore, waiters: Waiters, limits: RequestLimits) -> None:
        self._follower = follower
        self._store = store
        self._waiters = waiters
        self._limits = limits

    @property
    def is_stale(self) -> bool:
        return self._follower.age_seconds() > self._limits.stale_seconds

    @property
    def is_clock_contradicted(self) -> bool:
        return self._follower.is_clock_contradicted

    def as_of(self) -> AsOf:
        """Raises Problem follower-stale if the World is too old to be shown."""
        if self.is_stale:
            age_seconds = self._follower.age_seconds()
            detail = self._follower.why_stale() or (
                f"the overview is {age_seconds:.0f} s old, older than {self._limits.stale_seconds:.0f} s; "
                "single tasks can still be read, and /readyz says which part does not answer"
            )
            raise Problem("follower-stale", detail)
        return self.last_seen()

    def last_seen(self) -> AsOf:
        """However old it is."""
        age_seconds, world = self._follower.age_seconds(), self._follower.world
        at = rfc3339(world.as_of)
        return {"as_of": at, "age_seconds": round(age_seconds, 3), "position": world.position}

    async def catch_up(self) -> None:
        """Return when the World has all that was committed before this call, or after `settle_seconds`.

        An explanation then agrees with what a client has already read in a row or in the log.
        """
        head = await self._store.head()
        if self._follower.world.position < head:
            with self._waiters.behind(head) as caught_up:
                await caught_up.within(self._limits.settle_seconds)
