"""Work streams: their weights, what is told of them, and draws."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from gpubroker.tasks.submission import plain
from gpubroker.transport.decoding import Answered, Page, decode, page_of
from gpubroker.transport.exchange import Steps
from gpubroker.transport.operations import Operations, operation, path_part, without_none


@dataclass(frozen=True, slots=True)
class WorkStream(Answered):
    """A work stream, and what it counts now: `weight` is the product of its `factors`."""

    name: str
    weight: float = 1.0
    factors: Mapping[str, float] = field(default_factory=dict)
    """curriculum, velocity, staleness and quality."""
    probability: float = 0.0
    """That `next_stream` draws it; 0 while it is paused."""
    paused: bool = False
    progress: float | None = None
    progress_at: datetime | None = None
    velocity_per_hour: float = 0.0
    data_age_seconds: float | None = None
    quality: float = 1.0


@dataclass(frozen=True, slots=True)
class DrawnStream(Answered):
    stream: WorkStream
    seed: int = 0
    """Draws the same stream again while weights are equal."""


class StreamApi(Operations):
    @operation
    def streams(self) -> Steps[Page[WorkStream]]:
        """All work streams, by name."""
        return page_of(WorkStream, (yield from self._ask("GET", "/streams")))

    @operation
    def next_stream(self, *, seed: int | None = None) -> Steps[DrawnStream]:
        """Draw the work stream to go on with, each by its probability. Raises Refused if there is none."""
        return decode(
            DrawnStream, (yield from self._ask("POST", "/streams/next", without_none({"seed": seed})))
        )

    @operation
    def signal_stream(
        self,
        name: str,
        *,
        progress: float | None = None,
        progress_at: datetime | None = None,
        data_age_seconds: float | None = None,
        quality: float | None = None,
    ) -> Steps[WorkStream]:
        """Tell of a stream's progress (Elo, a score: more is better; `progress_at`: when it was measured), of
        the age of its newest data, of their quality from 0 to 1. Give at least one."""
        body = {
            "progress": progress,
            "progress_at": None if progress_at is None else plain("progress_at", progress_at),
            "data_age_seconds": data_age_seconds,
            "quality": quality,
        }
        path = f"/streams/{path_part(name)}/signals"
        return decode(WorkStream, (yield from self._ask("POST", path, without_none(body))))

    @operation
    def put_stream(self, name: str, curriculum: float, *, reason: str = "") -> Steps[WorkStream]:
        """Give a stream its curriculum weight; one that does not exist begins to."""
        body = {"curriculum": curriculum, "reason": reason}
        return decode(WorkStream, (yield from self._ask("PUT", f"/streams/{path_part(name)}", body)))

    @operation
    def delete_stream(self, name: str) -> Steps[None]:
        """Forget what was told of a stream. One of the settings stays, with the weight that it has there."""
        yield from self._ask_once("DELETE", f"/streams/{path_part(name)}")
