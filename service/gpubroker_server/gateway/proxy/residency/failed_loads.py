"""Models whose load has failed lately: the next request for one reads that at once, instead of waiting for
another load to fail."""

from dataclasses import dataclass
from math import ceil
from typing import Final

from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.gateway.http.problems import Problem

AGAIN_SECONDS: Final = Seconds(30.0)
"""A request that comes later has the model loaded again."""


@dataclass(frozen=True, slots=True)
class _Failed:
    why: str
    revision: str
    until: Instant


class FailedLoads:
    """Of one server, as one gateway has heard."""

    def __init__(self) -> None:
        self._failed: dict[str, _Failed] = {}

    def note(self, model: str, why: str, revision: str, now: Instant) -> Problem:
        """`revision`: of the files that were loaded, as in `Described`."""
        self._failed[model] = _Failed(why, revision, Instant(now + AGAIN_SECONDS))
        return self._problem(model, now)

    def forget(self, model: str) -> None:
        """Somebody asks for another try."""
        self._failed.pop(model, None)

    def check(self, model: str, revision: str, now: Instant) -> None:
        """Raises Problem model-not-loaded, unless it is time for another try or the files have changed."""
        failed = self._failed.get(model)
        if failed is None:
            return
        if now < failed.until and revision == failed.revision:
            raise self._problem(model, now)
        del self._failed[model]

    def _problem(self, model: str, now: Instant) -> Problem:
        failed = self._failed[model]
        seconds = max(1, ceil(failed.until - now))
        detail = (
            f"model {model[:100]} is not in memory, its load failed: {failed.why}; the first request after "
            f"{seconds} s has it loaded again, changed files or POST /models/{{name}}/load at once"
        )
        return Problem("model-not-loaded", detail, headers={"Retry-After": str(seconds)})
