"""What was measured lately, beside what is measured now."""

from collections.abc import Callable
from typing import Annotated

from gpubroker.units import seconds
from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from gpubroker_server.core.control.history import OLDEST_SECONDS, STEP_SECONDS, step_of
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.gateway.http.bodies import Query as QueryModel
from gpubroker_server.gateway.http.times import Time, rfc3339
from gpubroker_server.gateway.parts import Parts


class HistoryView(TypedDict):
    """Means of `step_seconds` each, the oldest first; null: nothing was measured then."""

    since: Time
    step_seconds: float
    values: Annotated[
        dict[str, list[float | None]],
        Field(
            description="Of a GPU `utilization` (0 to 1), `used_mb`, `power_watts`, `temperature_celsius`; "
            "of a node `cpu` and `disk` (0 to 1) and `memory_used_mb`. What was never measured is left out."
        ),
    ]


def _check(text: str) -> str:
    if seconds(text) > OLDEST_SECONDS:
        raise ValueError("an hour is kept, and no more: ask for 1h or less")
    return text


class HistoryQuery(QueryModel):
    history: Annotated[
        str,
        AfterValidator(_check),
        Field(description="How much of the past to show, such as `1h`, which is the most, or `0`."),
    ] = "5m"

    def reader(self, parts: Parts) -> Callable[[str], HistoryView]:
        """Of a node by its name, or of a device by its key."""
        newest = step_of(parts.clock.now())
        steps = range(newest + 1 - round(seconds(self.history) / STEP_SECONDS), newest + 1)
        since = rfc3339(Instant(steps.start * STEP_SECONDS))

        def read(name: str) -> HistoryView:
            return {"since": since, "step_seconds": STEP_SECONDS, "values": parts.history.means(name, steps)}

        return read
