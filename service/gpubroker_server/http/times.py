"""Times in requests and answers, as in RFC 3339, and the age of the World that an overview shows."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Protocol

from gpubroker.wire.answered import Time
from pydantic import AwareDatetime, BeforeValidator, Strict
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from gpubroker_server.core.domain.limits import ServiceLimits
from gpubroker_server.core.domain.progress import Progress
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.world.world import World
from gpubroker_server.http.problems import Problem
from gpubroker_server.http.waiters import Waiters
from gpubroker_server.ports.store import (
    Clock,
    TaskStore,
)

_WRITTEN_OUT = re.compile(r"\d{4}-\d\d-\d\d[Tt_ ]\d\d:\d\d(:\d\d([.,]\d+)?)?([Zz]|[+-]\d\d:?\d\d)?")


def _written_out(value: Any) -> Any:
    """Return the value. Raises PydanticCustomError for a number, which pydantic would take for seconds since
    1970, and for a date without a time."""
    if isinstance(value, datetime) or (isinstance(value, str) and _WRITTEN_OUT.fullmatch(value.strip())):
        return value
    raise PydanticCustomError("time_form", "must be a date and a time")


GivenTime = Annotated[AwareDatetime, Strict(False), BeforeValidator(_written_out)]
"""A time in a body or a query: a date, a time and a zone, written out as in RFC 3339."""


def rfc3339(at: Instant) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


class Moment(TypedDict):
    """The fields of a `gpubroker.wire` AsOf."""

    as_of: Time
    age_seconds: float
    position: int


class Follower(Protocol):
    """The World of this process, which follows the event log on the gateway's event loop."""

    @property
    def world(self) -> World:
        """The World. Treat it as read-only."""

    @property
    def clock(self) -> Clock: ...

    @property
    def progress(self) -> Mapping[TaskId, Progress]:
        """The latest progress report of each run."""

    def age_seconds(self) -> float:
        """Return the seconds since the World was last known to be at the head of the log."""

    @property
    def is_clock_contradicted(self) -> bool:
        """True if the clock of the database contradicts the clock of this process, and is therefore
        ignored."""

    def why_stale(self) -> str:
        """Return a text that says what to do if waiting does not make the World current; empty otherwise."""


class Freshness:
    """Refuses to show a World that is too old, and waits until the World contains recent commits."""

    def __init__(self, follower: Follower, store: TaskStore, waiters: Waiters, limits: ServiceLimits) -> None:
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

    def moment(self) -> Moment:
        """Return the time, age and log position of the World. Raises Problem follower-stale if the World is
        too old."""
        if self.is_stale:
            age_seconds = self._follower.age_seconds()
            detail = self._follower.why_stale() or (
                f"the overview is {age_seconds:.0f} s old, older than {self._limits.stale_seconds:.0f} s; "
                "single tasks can still be read, and /readyz says which part does not answer"
            )
            raise Problem("follower-stale", detail)
        return self.last_moment()

    def last_moment(self) -> Moment:
        """Return the time, age and log position of the World, however old it is."""
        age_seconds, world = self._follower.age_seconds(), self._follower.world
        return {
            "as_of": Time.at(world.as_of),
            "age_seconds": round(age_seconds, 3),
            "position": world.position,
        }

    async def catch_up(self) -> None:
        """Wait until the World contains all that was committed before this call, for at most
        `settle_seconds`.

        An explanation then agrees with the rows and events that a client has already read.
        """
        head = await self._store.head()
        if self._follower.world.position < head:
            with self._waiters.behind(head) as caught_up:
                await caught_up.within(self._limits.settle_seconds)
