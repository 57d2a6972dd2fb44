"""Measured values of the recent past, beside those of now."""

from collections.abc import Callable
from typing import Annotated

from gpubroker.units import seconds
from gpubroker.wire.answered import Time
from gpubroker.wire.devices import History
from pydantic import AfterValidator, Field

from gpubroker_server.core.control.history import OLDEST_SECONDS, STEP_SECONDS, step_of
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.http.bodies import Query as QueryModel


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

    def reader(self, parts: Parts) -> Callable[[str], History]:
        """Return what reads the history of a node by its name, or of a device by its key."""
        newest = step_of(parts.clock.now())
        steps = range(newest + 1 - round(seconds(self.history) / STEP_SECONDS), newest + 1)
        since = Time.at(steps.start * STEP_SECONDS)

        def read(name: str) -> History:
            return History(since, STEP_SECONDS, parts.history.means(name, steps))

        return read
