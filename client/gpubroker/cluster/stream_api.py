"""Work streams: their weights, the signals about them, and draws."""

from datetime import datetime

from gpubroker.tasks.submission import plain
from gpubroker.transport.decoding import Page, decode, page_of
from gpubroker.transport.exchange import Steps
from gpubroker.transport.operations import Operations, operation, path_part, without_none
from gpubroker.wire.streams import DrawnStream, WorkStream


class StreamApi(Operations):
    @operation
    def streams(self) -> Steps[Page[WorkStream]]:
        """Return all work streams, sorted by name."""
        return page_of(WorkStream, (yield from self._ask("GET", "/streams")))

    @operation
    def next_stream(self, *, seed: int | None = None) -> Steps[DrawnStream]:
        """Draw the work stream to continue with, each by its probability. Raises Refused if there is none."""
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
        """Report a stream's progress (Elo or another score: more is better; `progress_at` is the time of its
        measurement), the age of its newest data in seconds, and the quality of its data from 0 to 1. Give at
        least one of them."""
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
        """Set the curriculum weight of a stream. A stream that does not exist is created."""
        body = {"curriculum": curriculum, "reason": reason}
        return decode(WorkStream, (yield from self._ask("PUT", f"/streams/{path_part(name)}", body)))

    @operation
    def delete_stream(self, name: str) -> Steps[None]:
        """Forget what was reported of a stream. A stream of the settings stays, with the weight that it has
        there."""
        yield from self._ask_once("DELETE", f"/streams/{path_part(name)}")
