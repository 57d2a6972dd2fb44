"""Room that forecasts keep: from whom, for whom, and what would let a task have it all the same."""

from dataclasses import replace

from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.explain.blockers import Blocker, called
from gpubroker_server.core.explain.what_if import WhatIf
from gpubroker_server.core.planning.backfill import Planned
from gpubroker_server.core.planning.lines import First
from gpubroker_server.core.planning.survey import Survey

LEAST_SECONDS = 1.0
"""Nobody is advised to be done in less."""


def kept_for_forecasts(seen: Survey) -> list[Blocker]:
    """What keeps a task away for which there is room; empty if nothing does."""
    what_if = WhatIf(seen.draft, seen.policy, seen.now, seen.forecasts, seen.known)
    keepers = what_if.reserved_from(seen.task)
    if not keepers:
        return []
    first = min(keepers, key=_start_at)
    who, begins = called(first.task.id, first.task.tenant, seen.task), _seconds_until(first, seen)
    more = f" and {len(keepers) - 1} more" if len(keepers) > 1 else ""
    if isinstance(first, First):
        what = f"what {who}{more} waits for is left to it; it is expected to start"
    else:
        what = f"it has room, which is kept for {who}{more}, expected to start on {first.node}"
    message = f"{what} in {begins:.0f} s: nobody knows that this one is done by then"
    return [Blocker(Reason.BEHIND_HIGHER_PRIORITY, message)]


def short_enough(seen: Survey, what_if: WhatIf) -> tuple[Task, Seconds] | None:
    """The same task, said to be done before whoever it would delay is expected to start."""
    keepers = what_if.reserved_from(seen.task)
    if not keepers:
        return None
    seconds = Seconds(float(int(min(_seconds_until(one, seen) for one in keepers))))
    if seconds < LEAST_SECONDS or seconds >= (seen.task.expected_seconds or float("inf")):
        return None
    return replace(seen.task, expected_seconds=seconds), seconds


def _start_at(one: Planned | First) -> tuple[float, str]:
    return one.forecast.start_at, one.task.id


def _seconds_until(one: Planned | First, seen: Survey) -> float:
    return max(0.0, one.forecast.start_at - seen.now)
